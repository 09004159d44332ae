#!/usr/bin/env python3
"""Stock llama-bench with and without the plugin, no worker anywhere: what the expert kernels are worth to a program that
knows nothing of Kvasir. `bench/run 122b` calls it; docs/performance.md has its numbers.

  bench/llama_bench.py BUILD LLAMA_BIN MODEL [--rounds N] [--prompt N] [--tokens N] [--threads N]

Ways take turns, forwards and backwards; ratios are medians over the rounds, each against `default` of the same round:
  default  llama-bench as it is: experts in repacked buffers, whose bits are others (it has no --no-repack)
  off      GGML_BACKEND_PATH=libggml-kvasir.so, KVASIR_MODEL=MODEL, KVASIR_KERNELS=off: the experts as ggml's graph in plain
           buffers, which is what llama.cpp does with --no-repack
  plugin   the same with the kernels
"""

import argparse
import json
import os
import statistics
import subprocess
import sys


def measure(program, arguments, environment):
    """Tokens per second of the prompt and of decoding."""
    done = subprocess.run([program, *arguments, "-o", "json", "-r", "1"], env={**os.environ, **environment},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{program} failed: {done.stderr[-2000:]}")
    tests = json.loads(done.stdout)
    prompt = next(test["avg_ts"] for test in tests if test["n_gen"] == 0)
    decode = next(test["avg_ts"] for test in tests if test["n_prompt"] == 0)
    return prompt, decode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("llama_bin")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    program = os.path.join(flags.llama_bin, "llama-bench")
    work = ["-m", flags.model, "-p", str(flags.prompt), "-n", str(flags.tokens), "-t", str(flags.threads)]
    plugin = {"GGML_BACKEND_PATH": os.path.abspath(os.path.join(flags.build, "lib", "libggml-kvasir.so")),
              "KVASIR_MODEL": os.path.abspath(flags.model), "KVASIR_LISTEN": "127.0.0.1:0"}
    ways = {
        "default": {},
        "off": {**plugin, "KVASIR_KERNELS": "off"},
        "plugin": plugin,
    }
    speeds = {name: [] for name in ways}
    for turn in range(flags.rounds):
        names = list(ways) if turn % 2 == 0 else list(reversed(ways))
        for name in names:
            speeds[name].append(measure(program, work, ways[name]))
    print(f"{'':<8} {'prompt tok/s':>12} {'ratio':>7} {'decode tok/s':>12} {'ratio':>7}")
    for name, rounds in speeds.items():
        line = f"{name:<8}"
        for kind in (0, 1):
            ratio = statistics.median(mine[kind] / theirs[kind] for mine, theirs in zip(rounds, speeds["default"]))
            line += f" {statistics.median(each[kind] for each in rounds):>12.2f} {ratio:>7.3f}"
        print(line)


if __name__ == "__main__":
    main()
