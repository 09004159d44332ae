#!/usr/bin/env python3
"""What the network costs: a layer through a relay beside a direct hub, and the way from `worker --join` to serving beside
curl of as many bytes. `bench/run network` calls it; docs/performance.md has its numbers.

  bench/network.py layers BUILD MODEL [--rounds N] [--tokens N] [--workers N] [--json FILE]
  bench/network.py join BUILD MODEL [--rounds N] [--budget BYTES] [--json FILE]

Programs are started as people start them, ways take turns, and every number is a median over the rounds. Ways of a layer:
  direct      run --listen              worker --connect, no relay, no TLS
  up plain    up --plain                worker --join; the backbone is in the relay's process and uses its plain local port
  up TLS      up --dev-tls              the same, the worker over TLS
  market TLS  market --dev-tls, run --join, worker --join: three programs, TLS on both legs
"""

import argparse
import json
import multiprocessing
import re
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PATIENCE = 300  # seconds, for anything


class Program:
    """A program in the background whose stderr and stdout are read all the time."""

    def __init__(self, *command):
        self.command = [str(word) for word in command]
        self.lines = []
        self.changed = threading.Condition()
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace")
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()
        with self.changed:
            self.lines.append(None)
            self.changed.notify_all()

    def wait_for(self, pattern):
        """The match of the first line that has one."""
        end = time.monotonic() + PATIENCE
        seen = 0
        with self.changed:
            while True:
                for line in self.lines[seen:]:
                    found = line and re.search(pattern, line)
                    if found:
                        return found
                    if line is None:
                        sys.exit(f"network.py: {' '.join(self.command[:2])} ended without '{pattern}':\n{self.text()}")
                seen = len(self.lines)
                if not self.changed.wait(end - time.monotonic()):
                    sys.exit(f"network.py: {' '.join(self.command[:2])} does not say '{pattern}':\n{self.text()}")

    def text(self):
        return "".join(line for line in self.lines if line)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join()

    def report(self):
        """The JSON object that it prints at its end."""
        self.process.wait(PATIENCE)
        self.reader.join()
        for line in self.lines:
            if line and line.startswith("{"):
                return json.loads(line)
        sys.exit(f"network.py: {' '.join(self.command[:2])} printed no JSON:\n{self.text()}")


class Swarm:
    """The programs of one way, each round from the start; slices and keys stay in the folder."""

    def __init__(self, options, folder):
        self.kvasir = Path(options.build) / "bin/kvasir"
        self.options = options
        self.folder = Path(folder)

    def prompt(self):
        return ["-p", "Once upon a time", "-n", self.options.tokens, "--ignore-eos", "--json"]

    def workers(self, way, url, invite):
        started = []
        for index in range(self.options.workers):
            started.append(Program(self.kvasir, "worker", "--join", url, "--invite", invite, "--cache",
                                   self.folder / f"{way}-{index}".replace(" ", "-"), "--budget",
                                   self.options.budget, "--name", f"w{index}"))
        return started

    def direct(self):
        model = self.options.model
        backbone = Program(self.kvasir, "run", "-m", model, "--listen", "127.0.0.1:0", "--wait-coverage", "100%",
                           "--log-level", "info", *self.prompt())
        port = backbone.wait_for(r"workers may join on port (\d+)|ws://[^ ]*:(\d+)")
        port = port.group(1) or port.group(2)
        share = 32 // self.options.workers
        workers = [Program(self.kvasir, "worker", "--model", model, "--experts", f"0-7:{i * share}-{(i + 1) * share - 1}",
                           "--connect", f"ws://127.0.0.1:{port}") for i in range(self.options.workers)]
        report = backbone.report()
        for worker in workers:
            worker.stop()
        return report

    def up(self, way, protection):
        prompt = [word for word in self.prompt() if word != "--ignore-eos"]
        backbone = Program(self.kvasir, "up", "-m", self.options.model, "--listen", "127.0.0.1:0", "--state",
                           self.folder / way.replace(" ", "-"), protection, *prompt)
        line = backbone.wait_for(r"join: .*--join (\S+) --invite (\S+)")
        workers = self.workers(way, line.group(1), line.group(2))
        report = backbone.report()
        for worker in workers:
            worker.stop()
        return report

    def market(self, way):
        market = Program(self.kvasir, "market", "-m", self.options.model, "--listen", "127.0.0.1:0", "--state",
                         self.folder / way.replace(" ", "-"), "--dev-tls", "--print-invite", "worker",
                         "--print-invite", "backbone")
        url = market.wait_for(r"market: (\S+)").group(1)
        invites = {role: market.wait_for(rf"invite {role}: (\S+)").group(1) for role in ("worker", "backbone")}
        workers = self.workers(way, url, invites["worker"])
        report = Program(self.kvasir, "run", "-m", self.options.model, "--join", url, "--invite", invites["backbone"],
                         "--state", self.folder / (way.replace(" ", "-") + "-backbone"), "--wait-coverage", "100%",
                         *self.prompt()).report()
        for program in [*workers, market]:
            program.stop()
        return report


def layers(options, folder):
    swarm = Swarm(options, folder)
    ways = {"direct": swarm.direct, "up plain": lambda: swarm.up("up plain", "--plain"),
            "up TLS": lambda: swarm.up("up TLS", "--dev-tls"), "market TLS": lambda: swarm.market("market TLS")}
    seen = {way: [] for way in ways}
    digests = set()
    for round_number in range(options.rounds + 1):
        for way, start in ways.items():
            report = start()
            digests.add(report["logits_sha256"])
            if report["pairs_local"] != 0 or report["answers"] != "exact":
                print(f"(round {round_number}, {way}: {report['pairs_local']} pairs computed by the backbone, "
                      f"answers {report['answers']})")
            if round_number > 0:  # the first downloads
                seen[way].append(report)
    if len(digests) != 1:
        sys.exit("network.py: the ways gave different logits")
    out = {}
    print(f"{'overhead per layer, us':<24}{'p50':>8}{'p99':>8}{'tok/s':>8}   p50 of every round")
    for way, reports in seen.items():
        median = {key: statistics.median(r[key] for r in reports)
                  for key in ("overhead_us_p50", "overhead_us_p99", "gen_tok_s")}
        rounds = " ".join(f"{r['overhead_us_p50']:.0f}" for r in reports)
        print(f"{way:<24}{median['overhead_us_p50']:>8.1f}{median['overhead_us_p99']:>8.1f}"
              f"{median['gen_tok_s']:>8.0f}   {rounds}")
        out[way] = median
    return out


def serve_bytes(port_pipe, certificate, key, source):
    """One file over TLS for curl, in a process of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    port_pipe.send(listener.getsockname()[1])
    while True:
        accepted, _ = listener.accept()
        with context.wrap_socket(accepted, server_side=True) as peer, open(source, "rb") as file:
            peer.recv(65536)
            size = Path(source).stat().st_size
            peer.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode())
            while piece := file.read(1 << 20):
                peer.sendall(piece)


def join(options, folder):
    kvasir = Path(options.build) / "bin/kvasir"
    folder = Path(folder)
    state = folder / "state"
    market = Program(kvasir, "market", "-m", options.model, "--listen", "127.0.0.1:0", "--state", state, "--dev-tls",
                     "--print-invite", "worker")
    url = market.wait_for(r"market: (\S+)").group(1)
    invite = market.wait_for(r"invite worker: (\S+)").group(1)
    source = folder / "bytes"
    server = None
    seconds = {"worker --join until it serves": [], "until the slice is verified": [], "curl -o FILE": []}
    for round_number in range(options.rounds + 1):
        cache = folder / "worker"
        began = time.monotonic()
        worker = Program(kvasir, "worker", "--join", url, "--invite", invite, "--cache", cache, "--budget", options.budget)
        worker.wait_for(r"slice ready: ")
        took = {"until the slice is verified": time.monotonic() - began}
        worker.wait_for(r"serving (\d+) experts")
        took = {"worker --join until it serves": time.monotonic() - began, **took}
        size = sum(file.stat().st_size for file in cache.rglob("*.gguf"))
        worker.stop()
        shutil.rmtree(cache)
        if server is None:
            with open(options.model, "rb") as model, open(source, "wb") as out:
                out.write(model.read(size))
            receive, send = multiprocessing.Pipe(False)
            server = multiprocessing.Process(target=serve_bytes, daemon=True,
                                             args=(send, state / "dev-cert.pem", state / "dev-key.pem", source))
            server.start()
            port = receive.recv()
        began = time.monotonic()
        subprocess.run(["curl", "-sfk", "-o", folder / "fetched", f"https://127.0.0.1:{port}/"], check=True)
        took["curl -o FILE"] = time.monotonic() - began
        (folder / "fetched").unlink()
        if round_number > 0:  # the first fills the page cache
            for what, value in took.items():
                seconds[what].append(value)
    market.stop()
    server.terminate()
    print(f"{size / 1e6:.0f} MB over loopback with TLS, s    median   every round")
    for what, values in seconds.items():
        print(f"{what:<34}{statistics.median(values):>8.2f}   " + " ".join(f"{value:.2f}" for value in values))
    return {"bytes": size} | {what: statistics.median(values) for what, values in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "join"])
    parser.add_argument("build")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--budget", default="340M")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path(options.model).parent if options.what == "join" else None) as folder:
        result = {"layers": layers, "join": join}[options.what](options, folder)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


main()
