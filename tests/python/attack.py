"""Damaged inputs and faults of a machine, at random and counted: each must end with a result or a sentence.

    attack.py SIEVE WORK [--seed N] [--inputs N] [--faults N] [--only PART ...] [--library SO] [--torch PYTHON]

WORK is a folder that does not exist yet. PARTS of inputs: `tokenizer` (a file of an exported model), `checkpoint` (files
behind checksums that are right again), `shard` (prepared data with the right hash), `template` (a chat template that asks
for stack, memory or time without end), `plan` (every op of libsieve_capi.so through C, which SO names), `wheel`
(arguments of sieve_attention, with a PYTHON that has torch). PARTS of faults: `full`
and `read_only` (small file systems), `error` (a failed call of the C library, by LD_PRELOAD), `clock` (it jumps), `stop`
(SIGSTOP of a rank), `port` (taken), `twice` (two launches in one folder), `memory` and `files` (limits), `shm`.

Right is an exit code of 0, 1, 2 or 75, and unless 0 one sentence that begins with `error:`. After a fault
`--resume=auto` must end with the weights of a run without faults. A signal, the text of a panic, 30 seconds without an
end, 4 GB, several sentences, or other weights are failures; a line of each goes to WORK/failures.jsonl. Needs Linux, a C
compiler and `pip install xxhash`; root for the small file systems, which are left out and counted without it.
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from kinds import of_blocks_alone

ROOT = pathlib.Path(__file__).resolve().parents[2]
INPUTS = {"tokenizer": 0.2, "checkpoint": 0.2, "shard": 0.1, "template": 0.05, "plan": 0.35, "wheel": 0.1}
FAULTS = {
    "error": 40, "full": 20, "read_only": 4, "clock": 8, "stop": 8, "port": 4, "twice": 5, "memory": 8, "files": 8, "shm": 4
}  # fmt: skip
SECONDS, MOST_BYTES = 30, 4 << 30
PANIC = ("panicked", "a bug in Sieve", "stack backtrace", "memory allocation")
RECIPE = """
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
tie_word_embeddings = true
max_position_embeddings = 64
[attention]
kind = "dma"
keep_window_size = 8
[tokenizer]
train = { vocab_size = 300, sample_bytes = 100_000 }
[data]
paths = ["corpus/*.txt"]
validation_fraction = 0.1
[training]
steps = 24
seq_len = 32
local_batch_size = 2
global_batch_size = 4
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 4
decay_ratio = 0.25
[checkpoint]
interval = 4
keep_latest_k = 2
"""
# Fails the calls numbered AT to AT + MANY - 1 on files below PATHS with ERRNO; moves the clock of the wall by JUMP
# seconds when it was read AT times.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
static atomic_long calls, reads;
static long number(const char *name) { const char *text = getenv(name); return text ? atol(text) : 0; }
static int fails(const char *path) {
  const char *below = getenv("PATHS");
  if (!below || !path || !strstr(path, below)) return 0;
  long call = ++calls, at = number("AT");
  if (call < at || call >= at + number("MANY")) return 0;
  errno = number("ERRNO");
  return 1;
}
static int fails_at(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  path[size < 0 ? 0 : size] = 0;
  return fails(path);
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
ssize_t write(int fd, const void *from, size_t size) { NEXT(write); return fails_at(fd) ? -1 : next(fd, from, size); }
int fsync(int fd) { NEXT(fsync); return fails_at(fd) ? -1 : next(fd); }
int fdatasync(int fd) { NEXT(fdatasync); return fails_at(fd) ? -1 : next(fd); }
int ftruncate64(int fd, off64_t size) { NEXT(ftruncate64); return fails_at(fd) ? -1 : next(fd, size); }
int rename(const char *from, const char *to) { NEXT(rename); return fails(to) ? -1 : next(from, to); }
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); return fails(path) ? -1 : next(path, mode); }
int open64(const char *path, int flags, ...) {
  NEXT(open64);
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return (flags & (O_WRONLY | O_RDWR)) && fails(path) ? -1 : next(path, flags, mode);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  NEXT(clock_gettime);
  int status = next(clock, now);
  if (clock == CLOCK_REALTIME && getenv("JUMP") && ++reads > number("AT")) now->tv_sec += number("JUMP");
  return status;
}
"""
# What a chat template grows a value by, and what it does with it.
GROW = [
    "s ~ s", "s + s", "s * 9", "[s]", "(s, s)", "{'a': s}", "[s, s] | join(s)", "'%9999s' % s", "s | tojson", "[s] | reverse",
    "s | string | replace('a', 'aa')", "s | string | indent(999, true)", "[s] | batch(999, s) | list", "s | string | list",
    "[s] | map('string') | list", "namespace(s=s)", "s | string | center(99999)", "range(99999) | list", "'{}{}'.format(s, s)"
]  # fmt: skip
USE = [
    "{{ s }}", "{{ s | tojson(indent=99) }}", "{{ s == s }}", "{{ s in [s] }}", "{{ s | string | length }}", "x",
    "{{ [s, s] | sort }}", "{{ (s | string).split('a') | length }}", "{{ [s] | unique | list }}"
]  # fmt: skip
CHAIN = ["not ", "- ", "1+", "1~", "1 if 1 else ", "[", "(", "1 in ", "f(", "1**"]
BLOCK = ["{% if 1 %}", "{% for a in [1] %}", "{% filter upper %}", "{% set x %}", "{% generation %}", "{% macro f() %}"]
WORDS = "the a fox dog sees runs over under tree river stone quick lazy water boils when heat is high low north".split()


class Attack:
    def __init__(self, arguments):
        self.sieve, self.work = str(pathlib.Path(arguments.sieve).resolve()), pathlib.Path(arguments.work).resolve()
        self.random, self.arguments = random.Random(arguments.seed), arguments
        self.counts, self.failures = collections.defaultdict(collections.Counter), []
        self.work.mkdir()
        (self.work / "corpus").mkdir()
        for number in range(60):
            text = " ".join(self.random.choices(WORDS, k=120))
            (self.work / f"corpus/{number:02}.txt").write_text(text)
        (self.work / "recipe.toml").write_text(RECIPE)
        code, text, _ = self.run(self.train("reference"))
        assert code == 0, text
        code, text, _ = self.run([self.sieve, "export", "--checkpoint", "reference", "--out", "exported"])
        assert code == 0, text
        code, text, _ = self.run(self.launch("ranks"))
        assert code == 0, text
        # Two ranks add up in another order than one process.
        self.weights = [self.weights_of("reference/checkpoint/step-24"), self.weights_of("ranks/checkpoint/step-24")]

    def weights_of(self, folder):
        return [path.read_bytes() for path in sorted((self.work / folder).glob("model*.safetensors"))]

    def train(self, out, *more):
        return [self.sieve, "train", "--recipe", "recipe.toml", "--device", "cpu", "--out", str(out), "--resume=auto", *more]

    def launch(self, out, *more):
        command = self.train(out, "--set", "training.global_batch_size=4", "--patience", "4")
        return [self.sieve, "launch", "--nproc", "2", *more, "--", *command[1:]]

    def start(self, command, limits=(), **environment):
        def limit():
            for what, value in limits or [(resource.RLIMIT_AS, 8 << 30)]:
                resource.setrlimit(what, (value, value))

        environment = {**os.environ, "RAYON_NUM_THREADS": "2", **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, cwd=self.work, env=environment, preexec_fn=limit, start_new_session=True, **pipes)

    def finish(self, process, seconds=SECONDS):
        """Exit code (`hang`: it had to be killed), text, and the most memory in bytes."""
        ended = []

        def kill():
            ended.append("hang")
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, kill)
        timer.start()
        text = process.stdout.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        timer.cancel()
        code = os.waitstatus_to_exitcode(status)
        return ("hang" if ended else code), text, usage.ru_maxrss * 1024

    def run(self, command, seconds=SECONDS, **more):
        return self.finish(self.start(command, **more), seconds)

    def judge(self, part, what, result, codes=(0, 1, 2, 75)):
        """Counts an end, and keeps it if it is none of the right ones."""
        code, text, memory = result
        # A launcher puts the number of the rank before a line.
        sentences = sum(bool(re.match(r"(\[\d+\] )?error: ", line)) for line in text.splitlines())
        problem = None
        if code not in codes:
            problem = f"ended with {code}"
        elif any(word in text for word in PANIC):
            problem = "printed a panic"
        elif memory > MOST_BYTES:
            problem = f"took {memory >> 20} MiB"
        elif code in (1, 75) and sentences != 1 and "stopped" not in text:
            problem = f"{sentences} errors"
        self.counts[part][str(code)] += 1
        if problem:
            self.fail(part, what, problem, text)
        return problem is None

    def fail(self, part, what, problem, text=""):
        self.counts[part]["FAILED"] += 1
        self.failures.append({"part": part, "what": what, "problem": problem, "text": text[-1500:]})
        with open(self.work / "failures.jsonl", "a") as file:
            file.write(json.dumps(self.failures[-1]) + "\n")

    # Inputs.

    def mutated(self, data, is_text):
        """Bytes with one change, and what it was."""
        data, draw = bytearray(data), self.random
        if is_text and draw.random() < 0.6:
            try:
                tree = json.loads(data)
                what = self.change(tree)
                return json.dumps(tree, indent=2).encode(), what
            except ValueError:
                pass
        at = draw.randrange(len(data)) if draw.random() < 0.5 else draw.randrange(min(len(data), 4000))
        kind = draw.choice(["flip", "byte", "cut", "repeat", "delete", "number", "insert"])
        if kind == "flip":
            data[at] ^= 1 << draw.randrange(8)
        elif kind == "byte":
            data[at] = draw.choice(b"\x00\xff{}[]\"0-9,:\n")
        elif kind == "cut":
            del data[at:]
        elif kind == "repeat":
            data[at:at] = data[at : at + draw.randrange(1, 200)]
        elif kind == "delete":
            del data[at : at + draw.randrange(1, 200)]
        elif kind == "number":
            data[at : at + 8] = draw.choice([0, 1, 255, 2**31 - 1, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "little")
        else:
            data[at:at] = draw.choice([b"\xc3\x28", b"9" * 400, b"[" * 300, b"-", b"e999", b"\x1b[2J"])
        return bytes(data), f"{kind} at {at}"

    def change(self, tree):
        """Changes one value of parsed JSON in place."""
        draw, place = self.random, tree
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                raise ValueError
            key = draw.choice(keys)
            if not isinstance(place[key], (dict, list)) or draw.random() < 0.15:
                break
            place = place[key]
        old = place[key]
        values = [None, True, -1, 0, 1, 2**31 - 1, 2**32, 2**53, 2**64, 1e300, -0.5, "", "\u001b]0;x\u0007", "a" * 5000, [], {}]
        kind = draw.choice(["set", "set", "set", "delete", "other", "scale"])
        if kind == "delete":
            del place[key]
        elif kind == "other":
            place[key] = place[draw.choice(keys)]
        elif kind == "scale" and isinstance(old, (int, float)):
            place[key] = old * draw.choice([-1, 2, 1000, 10**6])
        else:
            place[key] = draw.choice(values)
        return f"{kind} {key!r}: {str(old)[:40]} is {str(place.get(key) if isinstance(place, dict) else '')[:40]}"

    def tokenizer(self, number):
        folder = self.work / "inputs/tokenizer"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.work / "exported", folder)
        data, what = self.mutated((folder / "tokenizer.json").read_bytes(), True)
        (folder / "tokenizer.json").write_bytes(data)
        command = [self.sieve, "generate", "--checkpoint", folder, "--prompt", "the fox", "--json", "--device", "cpu"]
        process = self.start([*map(str, command), "--max-new-tokens", "3", "--quiet"])
        result = self.finish(process)
        if self.judge("tokenizer", what, result) and result[0] == 0:
            lines = [line for line in result[1].splitlines() if not line.startswith("warning: ")]
            if len(lines) != 1 or not lines[0].startswith("{"):
                self.fail("tokenizer", what, "output beside the JSON", result[1])

    def checkpoint(self, number):
        import xxhash

        out = self.work / "inputs/checkpoint"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.work / "reference", out)
        for step in out.glob("checkpoint/step-*"):
            if step.name != "step-20":
                shutil.rmtree(step)
        step = out / "checkpoint/step-20"
        names = ["state.json", "state.json", "config.toml", "tokenizer.json", "model.safetensors", "optimizer.safetensors"]
        name = self.random.choice(names)
        state = json.loads((step / "state.json").read_text())
        # A state without its own checksum counts as edited by hand.
        del state["checksums"]["state.json"]
        if name == "state.json":
            what = self.change(state)
        else:
            data, what = self.mutated((step / name).read_bytes(), name.endswith("json"))
            (step / name).write_bytes(data)
            state["checksums"][name] = xxhash.xxh3_64_hexdigest(data)
        (step / "state.json").write_text(json.dumps(state))
        result = self.run(self.train(out))
        self.judge("checkpoint", f"{name}: {what}", result)

    def shard(self, number):
        import xxhash

        out = self.work / "inputs/shard"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        shutil.copytree(self.work / "reference/data", out / "data")
        splits = [f"{split}.{ending}" for split in ("train", "validation") for ending in ("bin", "idx")]
        name = self.random.choice([*splits, "validation.docs.json", "meta.json"])
        path = out / "data" / name
        data, what = self.mutated(path.read_bytes(), name.endswith("json"))
        path.write_bytes(data)
        if name.endswith(".bin"):
            meta = json.loads((out / "data/meta.json").read_text())
            part = meta[name.removesuffix(".bin")]
            part["tokens_hash"], part["bin_bytes"] = xxhash.xxh3_128_hexdigest(data), len(data)
            (out / "data/meta.json").write_text(json.dumps(meta))
        self.judge("shard", f"{name}: {what}", self.run(self.train(out, "--stop-after", "2")))

    def template(self, number):
        draw, folder = self.random, self.work / "inputs/template"
        if not folder.exists():
            shutil.copytree(self.work / "exported", folder)
        grow = "{% set s = " + draw.choice(GROW) + " %}"
        inside = "{% set ns.s = " + draw.choice(GROW).replace("namespace(s=s)", "[s]") + " %}"
        inside = re.sub(r"\bs\b(?!=)", "ns.s", inside).replace("ns.ns.s", "ns.s").replace("%9999ns.s", "%9999s")
        start = "{% set s = " + draw.choice(["'a'", "[1]", "1", "(1,)", "range(9)"]) + " %}"
        count = draw.choice([9, 60, 3000])
        chain = "{{ " + draw.choice(CHAIN) * draw.choice([60, 9000, 60000]) + "1 }}"
        loop = "{% set ns = namespace(s='a') %}{% for i in range(99999) %}" + inside + "{% endfor %}{% set s = ns.s %}"
        macro = "{% macro f(n) %}{% for i in range(99) %}{{ f(n + 1) if n < MOST }}{% endfor %}{% endmacro %}{{ f(0) }}"
        macro = macro.replace("MOST", str(draw.choice([3, 9999])))
        nest = "{% for i in range(99999) %}{% for j in range(99999) %}" + draw.choice(USE) + "{% endfor %}{% endfor %}"
        shapes = [start + grow * count + draw.choice(USE), loop + draw.choice(USE), chain, start + grow * 9 + nest, macro]
        text = draw.choice([*shapes, draw.choice(BLOCK) * draw.choice([60, 9000])])
        (folder / "chat_template.jinja").write_text(text)
        command = [self.sieve, "generate", "--checkpoint", folder, "--chat", "--prompt", "the fox", "--device", "cpu"]
        self.judge("template", text[:300], self.run([*map(str, command), "--max-new-tokens", "1", "--quiet"]))

    def worker(self, part, program, count):
        """Runs a part in processes of its own, which are started again behind what ended them."""
        done, seed = 0, self.random.randrange(1 << 30)
        while done < count:
            command = [program, __file__, "worker", part, str(self.arguments.library), str(seed), str(done), str(count)]
            code, text, memory = self.run(command, seconds=600)
            last = done
            for line in text.splitlines():
                if line.startswith("{"):
                    said = json.loads(line)
                    last = said["number"] + 1
                    self.counts[part][said["end"]] += 1
                    if said.get("problem"):
                        self.fail(part, said["what"], said["problem"])
            if code != 0 or memory > MOST_BYTES:
                self.fail(part, f"seed {seed}, behind number {last}", f"ended with {code}, {memory >> 20} MiB", text)
                last += 1
            done = max(last, done + 1)

    # Faults. Each of these functions causes one and returns a sentence about it.

    def recovered(self, part, what, out, command=None):
        """The run must go on to the weights of one without faults."""
        result = self.run(command or self.train(out))
        is_right = self.judge(part, f"{what}, then again", result, [0])
        if is_right and self.weights_of(f"{out}/checkpoint/step-24") not in self.weights:
            self.fail(part, what, "other weights", result[1])

    def shim(self):
        library = self.work / "shim.so"
        if not library.exists():
            (self.work / "shim.c").write_text(SHIM)
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, self.work / "shim.c", "-ldl"], check=True)
        return str(library)

    def error(self, number):
        out, most = f"faults/error-{number}", self.random.choice([60, 400])
        at = self.random.randrange(1, most)
        errno = self.random.choice([5, 5, 28, 122, 116])
        many = self.random.choice([1, 1, 5, 100_000])
        what = f"errno {errno} at call {at}, {many} times"
        fault = {"LD_PRELOAD": self.shim(), "PATHS": f"/{out}", "AT": str(at), "MANY": str(many), "ERRNO": str(errno)}
        result = self.run(self.train(out, "--checkpoint-patience", "3"), **fault)
        self.judge("error", what, result, [0, 75])
        self.recovered("error", what, out)

    def mounted(self, part, what, out, options, between, codes):
        """A run on a file system of its own, which `between` changes before the run goes on."""
        place, keep = self.work / "faults/mounted", self.work / out
        place.mkdir(parents=True, exist_ok=True)
        keep.mkdir(parents=True)
        train = " ".join(f"'{word}'" for word in self.train(place / "run", "--checkpoint-patience", "2"))
        script = f"mount -t tmpfs -o {options[0]} none {place} && {options[1]}; {train} > {keep}/log 2>&1; c=$?; {between}; "
        script += f"{train} > {keep}/again 2>&1; echo $c $?; cp {place}/run/checkpoint/step-24/model.safetensors {keep}"
        code, text, memory = self.run(["unshare", "-m", "sh", "-c", script], seconds=3 * SECONDS)
        try:
            first, second = map(int, text.splitlines()[0].split())
        except (ValueError, IndexError):
            return self.fail(part, what, f"ended with {code}", text)
        self.judge(part, what, (first, (keep / "log").read_text(errors="replace"), memory), codes)
        if self.judge(part, f"{what}, then again", (second, (keep / "again").read_text(errors="replace"), memory), [0]):
            if self.weights_of(out) not in self.weights:
                self.fail(part, what, "other weights", text)

    def full(self, number):
        kilobytes = self.random.randrange(8, 900)
        options = f"size={kilobytes}k", "true"
        larger = f"mount -o remount,size=99m {self.work / 'faults/mounted'}"
        self.mounted("full", f"{kilobytes} KiB", f"faults/full-{number}", options, larger, [0, 75])

    def read_only(self, number):
        place = self.work / "faults/mounted"
        # Before the run, or when it has some steps behind it.
        first = " ".join(f"'{word}'" for word in self.train(place / "run", "--stop-after", str(number * 5)))
        begun = f"{first} > {self.work}/begun 2>&1; " if number % 2 else ""
        options = "size=99m", f"{begun} mount -o remount,ro {place}"
        writable = f"mount -o remount,rw {place}"
        self.mounted("read_only", f"number {number}", f"faults/read_only-{number}", options, writable, [1, 75])

    def clock(self, number):
        jump = self.random.choice([-86400, 86400, -(10**8), 10**9, -3, 3600, -1_700_000_000])
        at = self.random.randrange(0, 300)
        out, what = f"faults/clock-{number}", f"by {jump} s at reading {at}"
        fault = {"LD_PRELOAD": self.shim(), "JUMP": str(jump), "AT": str(at)}
        self.judge("clock", what, self.run(self.train(out), **fault), [0])
        for line in (self.work / out / "metrics.jsonl").read_text().splitlines():
            step = json.loads(line)
            if not 0 <= step.get("tokens_per_second", 0) < 1e9 or not 0 <= step.get("eta_seconds", 0) < 1e6:
                self.fail("clock", what, "a speed that cannot be", line)
        self.recovered("clock", what, out)

    def ranks(self, launcher):
        """Process ids of a launcher's ranks, once there are two."""
        for _ in range(1000):
            children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            if len(children) == 2:
                return [int(child) for child in children]
            time.sleep(0.01)
        return []

    def stop(self, number):
        out, goes_on = f"faults/stop-{number}", number % 2 == 0
        long = ["--set", "training.steps=24"]
        process = self.start([*self.launch(out), *long])
        rank = self.random.choice(self.ranks(process.pid) or [process.pid])
        # Before the ranks have found each other they wait for minutes: other hosts may start late.
        log = self.work / out / "log"
        for _ in range(2000):
            if log.exists():
                break
            time.sleep(0.005)
        wait = self.random.uniform(0.0, 0.3)
        time.sleep(wait)
        what = f"after {wait:.2f} s" + (", for half a second" if goes_on else "")
        try:
            os.kill(rank, signal.SIGSTOP)
            if goes_on:
                time.sleep(0.5)
                os.kill(rank, signal.SIGCONT)
        except ProcessLookupError:
            what += ", too late"
        result = self.finish(process, 2 * SECONDS)
        self.judge("stop", what, result, [0] if goes_on else [0, 75])
        self.recovered("stop", what, out, self.launch(out))

    def port(self, number):
        out = f"faults/port-{number}"
        with socket.socket() as taken:
            taken.bind(("127.0.0.1" if number % 2 else "", 0))
            if number < 2:
                taken.listen()
            result = self.run(self.launch(out, "--port", str(taken.getsockname()[1])))
        self.judge("port", f"listening {number < 2}", result, [1, 75] if number < 2 else [0, 1, 75])
        self.recovered("port", "taken", out, self.launch(out))

    def twice(self, number):
        out = f"faults/twice-{number}"
        command = self.launch(out) if number % 2 else self.train(out)
        both = [self.start(command)]
        time.sleep(self.random.choice([0, 0.05, 0.3]))
        both.append(self.start(command))
        results = [self.finish(process) for process in both]
        for result in results:
            self.judge("twice", f"exit codes {[r[0] for r in results]}", result, [0, 1, 75])
        if not any(result[0] == 0 for result in results):
            self.fail("twice", f"number {number}", "neither trains", results[0][1] + results[1][1])
        self.recovered("twice", f"number {number}", out, command)

    def limited(self, part, number, limit, value):
        out = f"faults/{part}-{number}"
        result = self.run(self.train(out), limits=[(limit, value)])
        self.judge(part, f"a limit of {value}", result, [0, 1, 75])
        self.recovered(part, f"a limit of {value}", out)

    # The program itself takes 90 MB of address space, and its loader a file: below that it does not start.
    def memory(self, number):
        self.limited("memory", number, resource.RLIMIT_AS, (112, 96, 128, 160, 224, 320, 512, 1024)[number % 8] << 20)

    def files(self, number):
        self.limited("files", number, resource.RLIMIT_NOFILE, (4, 5, 8, 10, 12, 16, 24, 64)[number % 8])

    def shm(self, number):
        out = f"faults/shm-{number}"
        size = ("0", "4k", "64k", "1m")[number % 4]
        command = self.launch(out) if number % 2 else self.train(out)
        words = " ".join(f"'{word}'" for word in command)
        script = f"mount -t tmpfs -o size={'4k,nr_inodes=1' if size == '0' else size} none /dev/shm && exec {words}"
        self.judge("shm", size, self.run(["unshare", "-m", "sh", "-c", script]), [0])
        self.recovered("shm", size, out, command)


def calls_of_c():
    """Each op of libsieve_capi.so as a call with its tensors: crates/sieve-capi/tests/requests.txt."""
    tensors, calls = (ROOT / "crates/sieve-capi/tests/requests.txt").read_text().split("\n== calls\n{")
    rows = {line.split()[0]: line.split()[1:] for line in tensors.splitlines() if line and line[0] != "#"}
    requests = []
    for text in calls.split("\n{"):
        call, names = ("{" + text).rsplit("}", 1)
        inputs = []
        for name in names.split():
            plain, _, width = name.partition("@")
            dtype, *sizes = rows.get(name) or rows[plain]
            size = {"n": 2500, "d": int(width) if width.isdigit() else 128}
            inputs.append({"name": plain, "shape": [size.get(word) or int(word) for word in sizes], "dtype": dtype})
        requests.append((json.loads(call + "}"), inputs))
    return requests


def plans(library, seed, first, count):
    """Requests of every op, mutated; a line of JSON for each."""
    sieve = ctypes.CDLL(library)
    sieve.sieve_error.restype = sieve.sieve_plan_describe.restype = ctypes.c_char_p
    calls = calls_of_c()
    sizes = [0, 1, 2, 3, 7, 16, 63, 64, 65, 100, 128, 129, 256, 4097, 1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1]
    sizes += [-1, 1.5, None, "8"]
    gpus = [([8, 0], 108, 166912), ([8, 9], 128, 101376), ([9, 0], 132, 232448)]
    tensor_kinds = ["size", "size", "size", "rank", "dtype", "name", "strides", "drop", "twice"]
    for number in range(first, count):
        draw = random.Random(seed + number)
        call, tensors = json.loads(json.dumps(calls[number % len(calls)]))
        gpu = dict(zip(("capability", "multiprocessors", "shared_bytes"), draw.choice(gpus)))
        what = []
        # The first round is as it is: every op must have a plan.
        for _ in range(0 if number < len(calls) else draw.choice([1, 1, 1, 2, 3])):
            tensor, settings = draw.choice(tensors), next(iter(call.values()))
            kind = draw.choice([*tensor_kinds, "setting", "setting", "gpu"])
            if kind == "size" and tensor["shape"]:
                tensor["shape"][draw.randrange(len(tensor["shape"]))] = draw.choice(sizes)
            elif kind == "rank":
                tensor["shape"] = draw.choice([[], tensor["shape"][1:], [*tensor["shape"], 1], [1] * 70])
            elif kind == "dtype":
                tensor["dtype"] = draw.choice(["f32", "bf16", "i32", "f16", "", "i64", None])
            elif kind == "name":
                tensor["name"] = draw.choice(["q", "k", "", "doc_start", "nothing", "a" * 3000])
            elif kind == "strides":
                tensor["strides"] = [draw.choice(sizes) for _ in tensor["shape"]]
            elif kind == "drop":
                tensors.remove(tensor)
            elif kind == "twice":
                tensors.append(dict(tensor))
            elif kind == "setting" and isinstance(settings, dict) and settings:
                key = draw.choice(list(settings))
                others = [[], [0, 0, 0, 0], [1 << 40] * 4, [16, 8, 32, 1 << 33], True, 1e300, 1e-300]
                settings[key] = draw.choice([*sizes, *others])
            elif kind == "gpu":
                gpu[draw.choice(list(gpu))] = draw.choice([*sizes, [0, 0], [7, 5], [12, 0], [1 << 40, 1]])
            what.append(kind)
            if not tensors:
                break
        request = json.dumps({"call": call, "gpu": gpu, "tensors": tensors}).encode()
        plan = ctypes.c_void_p()
        status = sieve.sieve_plan(request, ctypes.byref(plan))
        said = {"number": number, "end": "planned", "what": f"{next(iter(call))}: {what} {request.decode()[:600]}"}
        if status:
            error = sieve.sieve_error().decode()
            said["end"] = "refused"
            if not error.strip() or "panic" in error:
                said["problem"] = f"says {error!r}"
            if number < len(calls):
                said["problem"] = f"has no plan: {error}"
        else:
            json.loads(sieve.sieve_plan_describe(plan))
            # A plan that was not loaded has nothing to run.
            if sieve.sieve_plan_run(plan, None, 0, None) == 0:
                said["problem"] = "runs without a GPU"
            sieve.sieve_plan_free(plan)
        print(json.dumps(said), flush=True)


def arguments_of_wheel(library, seed, first, count):
    """Wrong arguments of sieve_attention's functions: an exception, or a result of the stated shape."""
    os.environ["SIEVE_ATTENTION_LIBRARY"] = library
    sys.path.insert(0, str(ROOT / "python"))
    import torch
    import sieve_attention as sieve
    from sieve_attention import _library

    # Outputs of the stated shapes, in place of kernels.
    made = lambda plan, inputs: [torch.zeros(shape, dtype=dtype) for _, shape, dtype in plan.outputs]
    _library.Op.emulator = staticmethod(made)
    heads = lambda count, tokens=64: torch.zeros(1, tokens, count, 64, dtype=torch.bfloat16)
    blocks, rank = sieve.NsaBlocks(16, 8, 32, 3), torch.zeros(1, 2, 64)
    chosen = torch.zeros(1, 64, 2, 3, dtype=torch.int32)
    caches = lambda: [torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(2)]
    dma = torch.zeros(2, 128), torch.zeros(2)
    functions = {
        "attention": lambda: (sieve.attention, [heads(4), heads(2), heads(2)], {"window": 8, "scale": 0.1}),
        "dma_attention": lambda: (sieve.dma_attention, [heads(4), heads(2), heads(2), *dma], {"keep": 8}),
        "dma_scores": lambda: (sieve.dma_scores, [heads(2), *dma], {}),
        "select": lambda: (sieve.select, [rank], {"keep": 8, "local": 2}),
        "nsa_mean_pool": lambda: (sieve.nsa_mean_pool, [heads(2), heads(2)], {"blocks": blocks}),
        "nsa_selected": lambda: (sieve.nsa_selected, [heads(4), heads(2), heads(2), chosen], {"blocks": blocks}),
        "infllm_v2": lambda: (sieve.infllm_v2, [heads(4), heads(2), heads(2)], {"blocks": blocks, "local": 1}),
        **{
            kind: lambda kind=kind: (getattr(sieve, kind), [heads(4), heads(2), heads(2)], {"block": 16, "num_selected": 2})
            for kind in of_blocks_alone()
        },
        "block_sparse": lambda: (sieve.block_sparse, [heads(4), heads(2), heads(2), sieve.block_mask(torch.ones(4, 1, 1), 64)], {}),
        "decode": lambda: (sieve.decode, [heads(4, 1), heads(2, 1), heads(2, 1), *caches(), torch.zeros(1, dtype=torch.int32)], {"window": 8}),
        "mla_decode": lambda: (sieve.mla_decode, [torch.zeros(1, 1, 16, 576).bfloat16(), torch.zeros(1, 64, 576).bfloat16(), 512], {"scale": 0.1}),
        "documents": lambda: (sieve.documents, [torch.tensor([0, 10, 64]), 64], {}),
        "dma_slopes": lambda: (sieve.dma_slopes, [8, 2], {}),
    }
    values = [None, 0, -1, 1 << 62, 1.5, float("nan"), "x", (), [1, 2], True, torch.tensor(3), {}, object()]
    for number in range(first, count):
        draw = random.Random(seed + number)
        name = list(functions)[number % len(functions)]
        function, positional, named = functions[name]()
        places = [*range(len(positional)), *named]
        place, given = draw.choice(places), positional
        given = positional if isinstance(place, int) else named
        old = given[place]
        if isinstance(old, torch.Tensor) and draw.random() < 0.8 and number >= len(functions):
            change = draw.choice(["dtype", "shape", "size", "strides", "device", "empty", "gradient", "complex", "sparse", "expanded"])
            given[place] = {
                "dtype": lambda: old.to(draw.choice([torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.int8])),
                "shape": lambda: draw.choice([old[0], old.unsqueeze(0), old.flatten(), torch.zeros((), dtype=old.dtype)]),
                "size": lambda: torch.cat([old, old], draw.randrange(old.dim())),
                "strides": lambda: old.transpose(0, -1).contiguous().transpose(0, -1),
                "device": lambda: old.to("meta"),
                "empty": lambda: old.narrow(draw.randrange(old.dim()), 0, 0),
                "gradient": lambda: (old if old.is_floating_point() else old.float()).clone().requires_grad_(),
                "complex": lambda: old.to(torch.complex64),
                "sparse": lambda: old.float().to_sparse(),
                "expanded": lambda: old.narrow(0, 0, 1).expand(draw.choice([1, 3]), *old.shape[1:]),
            }[change]()
        else:
            change = "none" if number < len(functions) else "value"
            if change == "value":
                given[place] = draw.choice(values)
        said = {"number": number, "end": "result", "what": f"{name}: argument {place}: {change} {str(given[place])[:60]}"}
        try:
            function(*positional, **named)
        except (ValueError, TypeError, NotImplementedError) as error:
            said["end"] = type(error).__name__
            if not str(error).strip() or "panic" in str(error):
                said["problem"] = f"says {str(error)!r}"
            if change == "none":
                said["problem"] = f"right arguments are refused: {error}"
        except Exception as error:
            said.update(end=type(error).__name__, problem=f"{type(error).__name__}: {error}")
        print(json.dumps(said), flush=True)


def main():
    if sys.argv[1:2] == ["worker"]:
        part, library, *numbers = sys.argv[2:]
        return {"plan": plans, "wheel": arguments_of_wheel}[part](library, *map(int, numbers))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sieve")
    parser.add_argument("work")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=2500)
    parser.add_argument("--faults", type=int, default=sum(FAULTS.values()))
    parser.add_argument("--only", nargs="+", choices=[*INPUTS, *FAULTS], default=[*INPUTS, *FAULTS])
    parser.add_argument("--library", type=os.path.abspath, default=ROOT / "target/release/libsieve_capi.so")
    parser.add_argument("--torch", type=os.path.abspath, default=sys.executable)
    arguments = parser.parse_args()
    attack = Attack(arguments)
    for part, share in INPUTS.items():
        count = round(share * arguments.inputs) if part in arguments.only else 0
        if part in ("plan", "wheel"):
            attack.worker(part, arguments.torch if part == "wheel" else sys.executable, count)
            continue
        for number in range(count):
            getattr(attack, part)(number)
    for part, share in FAULTS.items():
        count = round(share * arguments.faults / sum(FAULTS.values())) if part in arguments.only else 0
        if part in ("full", "read_only", "shm") and os.geteuid() != 0:
            attack.counts[part]["left out, not root"] = count
            continue
        for number in range(count):
            getattr(attack, part)(number)
            attack.counts[part]["faults"] += 1
    for part, counts in attack.counts.items():
        print(f"{part:<12}" + ", ".join(f"{count} x {end}" for end, count in sorted(counts.items())))
    print(f"{len(attack.failures)} failures" + ("" if not attack.failures else f": {attack.work / 'failures.jsonl'}"))
    return len(attack.failures) > 0


if __name__ == "__main__":
    sys.exit(main())
