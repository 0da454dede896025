"""The stand-in GPU itself: memory to the byte, answers that follow from the batch, and machines that go wrong."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.standin
MACHINES = Path(__file__).parents[1] / "machines"
MIB, GIB = 1 << 20, 1 << 30


def test_torch_sees_the_described_gpu(standin):
    code = """
import torch
facts = torch.cuda.get_device_properties(0)
print(facts.name, facts.total_memory, torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[0])
"""
    context = round(0.14 * 1024) * MIB
    assert standin("t4").python(code).stdout.split() == [
        "Tesla", "T4", str(round(14.58 * 1024) * MIB), "(7,", "5)", str(round(14.58 * 1024) * MIB - context)
    ]  # fmt: skip


@pytest.mark.parametrize("expandable", [True, False])
def test_the_gpu_ends_at_its_last_page(standin, expandable):
    code = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
step = 20 << 20  # both kinds of segments grow by it here
tensors = [torch.empty(step, dtype=torch.uint8, device="cuda") for _ in range(free // step)]
print(free - torch.cuda.memory_reserved() < step, torch.cuda.memory_allocated() == len(tensors) * step)
try:
    torch.empty(step, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
"""
    machine = standin("rtx-3060", total_gib=2)
    environment = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    lines = machine.python(code, environment=environment).stdout.splitlines()
    assert lines[0] == "True True"
    assert "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 2.00 GiB" in lines[1]


def test_processes_share_a_gpu_and_nvml_names_them(standin):
    machine = standin("rtx-4090", total_gib=8)
    take = "import torch; x = torch.empty(5 << 30, dtype=torch.uint8, device='cuda'); print(1, flush=True); input()"
    neighbour = machine.start("python", "-c", take)
    neighbour.stdout.readline()
    code = """
import pynvml, torch
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
print([p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)])
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
"""
    pids, message = machine.python(code).stdout.splitlines()
    assert pids == f"[{neighbour.pid}]" and f"Process {neighbour.pid} has 5.35 GiB memory in use" in message
    neighbour.kill()
    neighbour.communicate()
    assert "MiB" not in machine.python(code).stdout  # its memory went with it


EXPRESSIONS = [
    "labels.ne(-100).sum()", "labels[:, 1:].ne(-100).sum()", "labels.ne(-100).sum(-1)",
    "(labels.ne(-100) & labels.ne(3)).sum()", "mask.all()", "mask.bool().all(-1)", "(mask == 1).any(0)",
    "mask.sum() == mask.numel()", "len(labels[labels.ne(-100)])", "(labels.ne(-100)).nonzero().shape",
    "long.ne(0).nonzero().shape", "labels.max(), labels.min()", "labels.t().ge(2).sum(), labels.lt(2).sum()",
    "(~mask.bool()).sum(), mask.logical_not().sum()", "torch.ones_like(labels).sum()",
]  # fmt: skip


def test_counts_and_comparisons_follow_from_what_the_host_copied(standin):
    """Each expression on the GPU, which ran no kernel, gives what it gives on the CPU."""
    code = f"""
import torch
torch.manual_seed(0)
labels = torch.randint(-3, 5, (3, 70)); labels[labels < 0] = -100
mask = torch.ones(4, 9, dtype=torch.long); mask[1, 7:] = 0
long = (torch.arange(3 * 7000) % 3).view(3, 7000)
def values(text, **tensors):
    result = eval(text, {{"torch": torch}}, tensors)
    parts = result if isinstance(result, tuple) else (result,)
    return [part.tolist() if torch.is_tensor(part) else part for part in parts]
assert torch.isfinite(torch.empty(100, device="cuda")).all()
for text in {EXPRESSIONS!r}:
    on_gpu = values(text, labels=labels.cuda(), mask=mask.cuda(), long=long.cuda())
    if on_gpu != values(text, labels=labels, mask=mask, long=long):
        print(text, on_gpu)
"""
    assert standin().python(code).stdout == ""


def test_unknown_values_are_read_as_zeros_and_counted(standin, tmp_path):
    code = "import torch; x = torch.randn(64, 64, device='cuda'); print((x @ x).sum().item(), (x == 0).sum().item())"
    machine = standin()
    assert machine.python(code, environment={"STAND_IN_TRACE": str(tmp_path / "trace")}).stdout == "0.0 0\n"
    trace = json.loads(next(tmp_path.glob("trace.*")).read_text())
    assert trace["unknown_reads"] == 1 and trace["synchronisations"] == {"cudaStreamSynchronize": 2}
    assert trace["launches"] == sum(trace["kernels"].values()) >= 4


def test_what_a_kernel_writes_is_unknown_and_neither_what_is_beside_it_nor_what_the_block_held_before(standin):
    code = """
import torch
x = torch.arange(1000)
y = x.cuda()
print(y.sum().item(), end=" ")
y.cumsum_(0)
print(y.sum().item())
written = torch.empty(256, dtype=torch.bfloat16, device="cuda")  # 512 bytes, a block of torch's to its end
beside = torch.tensor([3, 4], device="cuda")
assert beside.data_ptr() == written.data_ptr() + 512
torch.mul(torch.rand(256, dtype=torch.bfloat16, device="cuda").view(16, 16).t(), 2, out=written.view(16, 16))
print((beside == 3).tolist())
held = torch.zeros(64, dtype=torch.long, device="cuda")
for part in held.split(1):
    part.fill_(7)
del held
joined = torch.cat([torch.rand(3, device="cuda").argsort(), torch.rand(5, device="cuda").argsort()])
print(joined.tolist())
"""
    assert standin().python(code).stdout == "499500 0\n[True, False]\n[0, 0, 0, 0, 0, 0, 0, 0]\n"


def test_two_gpus_are_two_memories(standin):
    code = """
import torch
x = torch.empty(6 << 30, dtype=torch.uint8, device="cuda:1")
print(torch.cuda.device_count(), [round(torch.cuda.mem_get_info(i)[0] / 2**30) for i in range(2)], x.device)
"""
    machine = standin("rtx-3060", "rtx-4090", total_gib=8)
    assert machine.python(code).stdout == "2 [8, 2] cuda:1\n"
    assert machine.python(code, environment={"CUDA_VISIBLE_DEVICES": "1"}, check=False).returncode != 0


def test_a_driver_too_old_for_the_build_is_refused_as_by_cuda(standin):
    machine = standin(description=(MACHINES / "old-driver.machine").read_text())
    shown = machine.python("import torch; print(torch.cuda.is_available())")
    assert shown.stdout == "False\n" and re.search(r"driver on your system is too old \(found version 11040\)", shown.stderr)


def test_a_gpu_that_falls_off_the_bus_fails_at_the_next_call(standin):
    machine = standin()
    code = "import torch; x = torch.ones(3, device='cuda'); print(1, flush=True); input(); x.sum().item()"
    process = machine.start("python", "-c", code)
    process.stdout.readline()
    machine.lose_gpu()
    _, errors = process.communicate("go on\n")
    assert process.returncode == 1 and "unspecified launch failure" in errors


def test_a_context_is_opened_by_the_first_use_can_be_forbidden_and_leaves_nothing_on_the_gpu(standin):
    machine = standin()
    forbidden = {"STAND_IN_ABORT_ON_CONTEXT": "1"}
    machine.python("import torch; torch.cuda.is_available(), torch.cuda.device_count()", environment=forbidden)
    code = "import torch; torch.cuda.init(); torch.ones(1, device='cuda')"
    assert machine.python(code, environment=forbidden, check=False).returncode == -6
    machine.python(code)
    assert machine.used_bytes() == {}


def test_rates_of_a_gpu_that_computes_nothing_are_not_stored(standin, tmp_path):
    machine = standin("rtx-4090")
    machine.environment["FINETUNE_CACHE"] = str(tmp_path)
    (finding,) = json.loads(machine.run("cold finetune", "doctor", "--measure", "--json", check=False).stdout)["findings"]
    assert finding["state"] == "fail" and "the product of two matrices is wrong" in finding["what"]
    assert not (tmp_path / "rates.json").exists()
