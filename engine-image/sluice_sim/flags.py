"""Types of command-line values, shared by the flags of both flavours."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """What a flavour calls the flags that limit its room."""

    seqs: str
    batched_tokens: str
    context: str
    memory: str
    tensor: str


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def rank_number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def port_number(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..65535")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..86400 seconds")
    return value


def speed_factor(text: str) -> float:
    value = float(text)
    if not 0.001 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not within 0.001..1000000")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
