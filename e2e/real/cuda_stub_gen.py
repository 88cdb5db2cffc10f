"""Makes empty CUDA libraries, so that the CUDA build of torch imports on a machine without NVIDIA's.

`cuda_stub_gen.py SITE_PACKAGES`; needs gcc, nm and readelf. Each stub exports the symbols that torch's own libraries
ask for, under the version node that they ask for. A call returns an error code, so `torch.cuda.is_available()` is
False. For tests on CPU only; the pattern of names is that of CUDA 13.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

VENDOR = re.compile(r"lib(cu|nv|nccl)")
SYMBOL = re.compile(r"(cu|nv|nccl|__cuda|__nv)")
UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "curand": "libcurand.so.10",
    "cupti": "libcupti.so.13",
    "cudnn": "libcudnn.so.9",
    "nvshmem": "libnvshmem_host.so.3",
    "cusolver": "libcusolver.so.12",
    "nvrtc": "libnvrtc.so.13",
    "cufft": "libcufft.so.12",
}
"""Prefix of a symbol -> its library, for libraries without symbol versions."""
RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"
"""Loaded by name at run time, and only if there is a driver: never stubbed."""
TEXT = re.compile(r"(cuda|nccl|cudnn|cusparse|cublas)(Get\w*(Error|Status)\w*(String|Name))$|ncclGetLastError$")
"""Functions that return a text."""


@dataclass(slots=True)
class Wants:
    """What torch's libraries ask of others."""

    libraries: set[str] = field(default_factory=set)
    versioned: set[str] = field(default_factory=set)
    """Libraries that are asked for symbols with a version."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Library -> its version node."""
    undefined: dict[str, str] = field(default_factory=dict)
    """Symbol -> version, "" without one."""
    defined: set[str] = field(default_factory=set)


def output(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def read(libraries: Iterable[Path]) -> Wants:
    wants = Wants()
    for path in libraries:
        needed = (re.search(r"NEEDED.*\[(.*?)\]", line) for line in output("readelf", "-d", str(path)))
        wants.libraries |= {found[1] for found in needed if found and VENDOR.match(found[1])}
        _read_versions(path, wants)
        for line in output("nm", "-D", "--undefined-only", str(path)):
            kind, name = line.split()[0], line.split()[-1]
            if kind != "w":  # a weak symbol may stay undefined
                base, _, version = name.partition("@")
                wants.undefined.setdefault(base, version.strip("@"))
        for line in output("nm", "-D", "--defined-only", str(path)):
            wants.defined.add(line.split()[-1].partition("@")[0])
    return wants


def _read_versions(path: Path, wants: Wants) -> None:
    current = ""
    for line in output("readelf", "-V", str(path)):
        if found := re.search(r"File: (\S+)", line):
            current = found[1]
            wants.versioned.add(current)
        elif current and (found := re.search(r"Name: (\S+)\s+Flags", line)):
            wants.nodes.setdefault(current, found[1])


def assign(wants: Wants) -> dict[str, set[str]]:
    """Library -> the symbols that it has to have."""
    library_of = {version: library for library, version in wants.nodes.items() if library in wants.libraries}
    found: dict[str, set[str]] = defaultdict(set, {library: set() for library in wants.libraries})
    for name, version in wants.undefined.items():
        if version in library_of:
            found[library_of[version]].add(name)
        elif not version and name not in wants.defined and SYMBOL.match(name):
            found[next((lib for prefix, lib in UNVERSIONED.items() if name.startswith(prefix)), RUNTIME)].add(name)
    found.pop(DRIVER, None)
    return found


def source(symbols: set[str]) -> Iterator[str]:
    yield "int sluice_stub;"
    for name in sorted(symbols):
        is_text = TEXT.match(name)
        yield f'const char *{name}(void){{return "stub";}}' if is_text else f"int {name}(void){{return 100;}}"


def compile_stub(library: str, symbols: set[str], node: str | None, target: Path) -> None:
    """`node`: the version node of all symbols; None: no versions."""
    with tempfile.TemporaryDirectory() as directory:
        code, versions = Path(directory, "stub.c"), Path(directory, "stub.map")
        code.write_text("\n".join(source(symbols)) + "\n")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-Wl,-soname,{library}"]
        if node is not None:
            versions.write_text(f"{node} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script,{versions}")
        subprocess.run([*command, "-o", str(target / library), str(code)], check=True)


def main(site: Path) -> None:
    target = site / "nvidia" / "cu13" / "lib"
    target.mkdir(parents=True, exist_ok=True)
    wants = read((site / "torch" / "lib").glob("lib*.so"))
    for library, symbols in sorted(assign(wants).items()):
        node = wants.nodes[library] if library in wants.versioned else None
        compile_stub(library, symbols, node, target)
        print(library, len(symbols))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
