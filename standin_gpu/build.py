"""Build the stand-in libraries for the CUDA packages of one Python environment.

libcuda (driver.cpp and its includes), libcudart (runtime.cpp, answers.cpp), libnvidia-ml (nvml.c) and most of libnccl
(nccl.cpp) are written by hand. All other libraries that binaries of the environment need are generated from undefined symbols:
functions return 0, creators return a handle. So a new version of torch needs no change here. Needs gcc, g++, binutils and
CUDA's headers.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from standin_gpu.elf import needs

SOURCES = Path(__file__).parent / "src"
DRIVER_SOURCES = ("driver.cpp", "machine.cpp", "memory.cpp", "trace.cpp")
RUNTIME_SOURCES = ("runtime.cpp", "answers.cpp")
#: Functions by hand of libraries whose others are generated.
PARTLY_BY_HAND = {"libnccl": "nccl.cpp"}
#: Binaries of an environment that use CUDA.
BINARIES = (
    "torch/lib/*.so*", "torch/_C*.so", "bitsandbytes/libbitsandbytes_cuda13*.so", "xformers/*.so", "torchvision/*.so",
    "torchao/*.so",
)  # fmt: skip
#: What NVIDIA's libraries are called; others that a binary needs are the system's.
NVIDIA = re.compile(r"lib(cu|nccl|nv)")
#: Which library a symbol without a version belongs to, by the beginning of its name.
LIBRARY_BY_PREFIX = (
    ("ncclx", "libnccl"), ("nccl", "libnccl"), ("cusparseLt", "libcusparseLt"), ("cuFile", "libcufile"),
    ("nvshmem", "libnvshmem_host"), ("cublasLt", "libcublasLt"), ("cublas", "libcublas"), ("cudnn", "libcudnn"),
    ("curand", "libcurand"), ("cufft", "libcufft"), ("cusolver", "libcusolver"), ("cusparse", "libcusparse"),
    ("cupti", "libcupti"), ("nvrtc", "libnvrtc"), ("cuda", "libcudart"), ("__cuda", "libcudart"),
)  # fmt: skip
#: What needs more than an answer of 0. cublasLt's heuristic must offer one algorithm (its result is 96 bytes).
BODIES = {
    "cublasLtMatmulAlgoGetHeuristic": "(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int wanted,"
    " char *results, int *count) { for (int i = 0; i < 96; i++) results[i] = 0; *count = wanted > 0; return 0; }",
    "cudnnGetVersion": "(void) { return 92000; }",
    "cudnnGetCudartVersion": "(void) { return 13000; }",
    "cudnnBackendCreateDescriptor": "(int kind, void **handle) { *handle = calloc(1, 64); return 0; }",
    "cublasGetVersion_v2": "(void *handle, int *version) { *version = 130100; return 0; }",
    "cublasLtGetVersion": "(void) { return 130100; }",
    "cublasLtGetCudartVersion": "(void) { return 13000; }",
    "nvrtcVersion": "(int *major, int *minor) { *major = 13; *minor = 0; return 0; }",
    "cuptiGetVersion": "(int *version) { *version = 130000; return 0; }",
    "cuptiGetResultString": '(int code, const char **text) { *text = "stand-in"; return 0; }',
    "cuptiActivityGetNextRecord": "(void) { return 12; }",
    "cuptiSubscribe": "(void **handle) { *handle = calloc(1, 64); return 0; }",
}
CREATOR = re.compile(r"Create(_v2|Program|$)|(cusparse|cusolver\w\w|cudnn|cublas|cublasLt|curand|cufft)\w*Create\w*$")
#: Symbols that libraries need, by version: {"libcublas.so.13": {"libcublas.so.13": {"cublasCreate_v2", ...}}}.
Wanted = Mapping[str, Mapping[str, Collection[str]]]


class BuildError(Exception):
    """The missing part, in one sentence."""


def wanted_symbols(sites: Sequence[Path]) -> tuple[set[str], Wanted]:
    """(names of the libraries that an environment's binaries need, the symbols they need of each)."""
    binaries = {}
    for site in reversed(sites):  # a file of an earlier site hides that of a later one
        binaries |= {str(path.relative_to(site)): path for pattern in BINARIES for path in site.glob(pattern)}
    sonames: set[str] = set()
    undefined: list[tuple[str, str]] = []
    for binary in binaries.values():
        libraries, symbols = needs(binary)
        sonames |= {soname for soname in libraries if NVIDIA.match(soname)}
        undefined += symbols
    if not any(soname.startswith("libcudart") for soname in sonames):
        raise BuildError(f"{sites[0]} has no CUDA build of torch: pip install --no-deps torch===VERSION")
    soname_of = {soname.split(".so")[0]: soname for soname in sonames}
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, version in undefined:
        if NVIDIA.match(version):
            wanted[version][version].add(name)
        elif version in ("", "NVSHMEM"):
            library = next((library for prefix, library in LIBRARY_BY_PREFIX if name.startswith(prefix)), None)
            if library in soname_of:
                wanted[soname_of[library]][version].add(name)
            elif library is None and re.match(r"cu[A-Z]", name):
                wanted["libcuda.so.1"][""].add(name)
    return sonames, wanted


def runtime_of(sites: Sequence[Path], sonames: Collection[str]) -> str:
    """Torch's libcudart; packages beside it may need others, or bring their own under a name with a hash."""
    paths = (site / "torch" / "lib" / "libc10_cuda.so" for site in sites)
    of_torch = {soname for path in paths if path.exists() for soname in needs(path)[0]}
    return next(soname for soname in sorted(sonames) if soname.startswith("libcudart") and soname in (of_torch or sonames))


def declared(header: Path, pattern: str) -> set[str]:
    """Functions that a header declares, by the names that their macros give them."""
    text = header.read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(pattern, text))
    return names | {new for old, new in re.findall(r"#\s*define\s+(\w+)\s+(\w+)\s*$", text, re.M) if old in names}


def defined(*objects: Path) -> set[str]:
    """Functions that object files define."""
    command = ["nm", "--defined-only", "--extern-only", *map(str, objects)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in text.splitlines() if len(line.split()) == 3}


def stub(name: str) -> str:
    """C text of a function that nothing was written for."""
    if name in BODIES:
        return f"long {name}{BODIES[name]}"
    if re.search(r"Get\w*(String|Name|LastError)$", name):
        return f'const char *{name}(void) {{ return "stand-in"; }}'
    if CREATOR.search(name):
        return f"long {name}(void **handle) {{ if (handle) *handle = calloc(1, 256); return 0; }}"
    return f"long {name}(void) {{ return 0; }}"


def forwarder(name: str, target: str) -> str:
    """C text of a function that passes its arguments to another version of itself."""
    letters = "abcdefghijk"
    parameters = ", ".join(f"long {letter}" for letter in letters)
    return f"long {target}(); long {name}({parameters}) {{ return {target}({', '.join(letters)}); }}"


class Builder:
    """Compiles and links into one folder."""

    def __init__(self, out: Path, include: Path):
        self.out, self.include = out, include
        self.temporary: list[Path] = []

    def compile(self, source: Path) -> Path:
        target = self.out / f"{source.name}.o"
        compiler = "g++" if source.suffix == ".cpp" else "gcc"
        command = [compiler, "-c", "-fPIC", "-O1", "-w", f"-I{self.include}", f"-I{SOURCES}", "-o", str(target), str(source)]
        if source.suffix == ".cpp":
            command.insert(1, "-std=c++17")
        subprocess.run(command, check=True)
        self.temporary.append(target)
        return target

    def write(self, name: str, lines: list[str]) -> Path:
        path = self.out / name
        path.write_text("\n".join(["#include <stdlib.h>" if name.endswith(".c") else "", *lines, ""]), encoding="utf-8")
        self.temporary.append(path)
        return path

    def link(self, soname: str, *parts: Path | str) -> None:
        command = [
            "g++",
            "-shared",
            f"-L{self.out}",
            f"-Wl,-soname,{soname}",
            "-o",
            str(self.out / soname),
            *map(str, parts),
            "-ldl",
        ]
        subprocess.run(command, check=True)

    def driver(self, wanted: Collection[str]) -> None:
        """libcuda.so.1: by hand, and what else cuda.h declares; a name without a version calls the newest version."""
        objects = [self.compile(SOURCES / name) for name in DRIVER_SOURCES]
        by_hand = defined(*objects)
        names = declared(self.include / "cuda.h", r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(") | set(wanted)
        missing = sorted((names | {re.sub(r"_v\d$", "", name) for name in names}) - by_hand)
        targets = {
            name: f"{name}{version}" for version in ("_v4", "_v3", "_v2") for name in missing if f"{name}{version}" in by_hand
        }
        lines = [forwarder(name, targets[name]) if name in targets else stub(name) for name in missing]
        self.link("libcuda.so.1", *objects, self.compile(self.write("driver_stubs.c", lines)))
        (self.out / "libcuda.so").unlink(missing_ok=True)
        (self.out / "libcuda.so").symlink_to("libcuda.so.1")

    def runtime(self, soname: str, wanted: Mapping[str, Collection[str]]) -> None:
        """libcudart: by hand, and what else cuda_runtime_api.h declares. Its symbols have its name as version."""
        objects = [self.compile(SOURCES / name) for name in RUNTIME_SOURCES]
        names = declared(self.include / "cuda_runtime_api.h", r"CUDARTAPI\s+(cuda[A-Z]\w+)\s*\(").union(*wanted.values())
        script = self.write("cudart.map", [f"{soname} {{ global: cuda*; __cuda*; local: *; }};"])
        stubs = self.compile(self.write("runtime_stubs.c", [stub(name) for name in sorted(names - defined(*objects))]))
        self.link(soname, *objects, stubs, "-l:libcuda.so.1", f"-Wl,--version-script={script}")

    def generated(self, soname: str, wanted: Mapping[str, Collection[str]]) -> None:
        """Build a library of stubs for the functions that other libraries need, beside its handwritten functions."""
        by_hand = [
            self.compile(SOURCES / name) for library, name in PARTLY_BY_HAND.items() if soname.startswith(f"{library}.so")
        ]
        names = set().union(*wanted.values()) - (defined(*by_hand) if by_hand else set())
        source = self.write(f"{soname}.c", [stub(name) for name in sorted(names)])
        versions = {version: names for version, names in wanted.items() if version}
        lines = [
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};" for version, names in versions.items()
        ]
        options = [f"-Wl,--version-script={self.write(f'{soname}.map', lines)}"] if lines else []
        self.link(soname, *by_hand, self.compile(source), *(["-l:libcuda.so.1"] if by_hand else []), *options)

    def nvml(self) -> None:
        """libnvidia-ml.so.1, which needs neither CUDA's headers nor torch."""
        self.link("libnvidia-ml.so.1", self.compile(SOURCES / "nvml.c"))

    def clean(self) -> None:
        for path in self.temporary:
            path.unlink(missing_ok=True)


def build(sites: Sequence[Path], out: Path, include: Path) -> list[str]:
    """Write the libraries for an environment (its site-packages, in order of search) into `out`; returns their names.

    `include` is the folder of cuda.h and cuda_runtime_api.h of torch's CUDA version. Raises BuildError if something is missing.
    """
    if not (include / "cuda_runtime_api.h").is_file():
        raise BuildError(
            f"{include} has no cuda_runtime_api.h: pip install --no-deps --target HEADERS nvidia-cuda-runtime nvidia-cuda-crt"
        )
    sonames, wanted = wanted_symbols(sites)
    runtime = runtime_of(sites, sonames)
    out.mkdir(parents=True, exist_ok=True)
    builder = Builder(out, include)
    try:
        builder.driver(wanted.get("libcuda.so.1", {}).get("", ()))
        builder.runtime(runtime, wanted.get(runtime, {}))
        builder.nvml()
        generated = sorted((sonames | set(wanted)) - {"libcuda.so.1", runtime, "libnvidia-ml.so.1"})
        for soname in generated:
            builder.generated(soname, wanted.get(soname, {}))
    finally:
        builder.clean()
    return ["libcuda.so.1", runtime, "libnvidia-ml.so.1", *generated]
