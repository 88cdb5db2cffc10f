"""Writes a tiny Llama with random weights into a directory; run by the real engine's interpreter, and none of ours.

`tiny_model.py DIRECTORY`: 147,776 parameters in bfloat16, a byte-level tokenizer and a chat template, all from a fixed
seed, so that greedy output is the same on every machine with the same torch. `head_dim` 32 is the least that vLLM's
attention on CPU takes (16 is refused at the first request).
"""

import importlib
import sys
from pathlib import Path
from typing import Any

SEED = 7
VOCABULARY = 512
CONTEXT = 131_072
TEXT = ("The quick brown fox jumps over the lazy dog.", "Streams of tokens flow through the router.", "0123456789")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE: every text has tokens. `add_prefix_space` off, as in Llama 3."""
    tokenizers: Any = importlib.import_module("tokenizers")
    trainers: Any = importlib.import_module("tokenizers.trainers")
    byte_level: Any = importlib.import_module("tokenizers.pre_tokenizers").ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    transformers: Any = importlib.import_module("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", model_max_length=CONTEXT
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def write_weights(directory: Path) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        # Larger than usual: with 0.02 the logits of so small a model lie too close together for a stable greedy choice.
        initializer_range=0.2,
        dtype="bfloat16",
    )
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_tokenizer(target)
    write_weights(target)
    for path in target.iterdir():
        path.chmod(0o644)  # the engine runs as another user
