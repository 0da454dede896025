"""`python benchmarks/waiting_threads.py [--busy N]`: small operators with OpenMP threads that sleep or spin while they wait.

Prints seconds and processor seconds of each, in alternating processes, and their ratio; `--busy`: other processes beside them.
"""

import argparse
import os
import statistics
import subprocess
import sys

STEPS = """
import time, torch
a, b = torch.randn(64, 256), torch.randn(256, 512)
def step(x):
    for _ in range(200):
        x = x + torch.tanh(x @ b)[:, :256] * 0.1
step(a)
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(10):
    step(a)
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def measure(policy: str) -> tuple[float, float]:
    """Seconds and processor seconds of 2,000 small products with the given OMP_WAIT_POLICY ("" is OpenMP's default)."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    process = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    wall, cpu = map(float, process.stdout.split())
    return wall, cpu


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        taken = [(measure("PASSIVE"), measure("")) for _ in range(options.pairs)]
    finally:
        for process in busy:
            process.kill()
    for which, name in ((0, "seconds"), (1, "processor seconds")):
        sleeping, spinning = (statistics.median(pair[policy][which] for pair in taken) for policy in (0, 1))
        print(f"{name}: sleeping {sleeping:.2f}, spinning {spinning:.2f}, ratio {spinning / sleeping:.2f}")


if __name__ == "__main__":
    main()
