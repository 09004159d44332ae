#!/usr/bin/env python3
"""The rules of the source tree that a compiler does not check: which module may include what, sizes, words.

Usage: tools/tidy.py [ROOT]    prints one line per finding (FILE:LINE: what, and what to do); exit 1 if there is one.
Needs nothing but the standard library. tidy_test.py feeds it bad trees.
"""

import os
import re
import sys

# The floors: a module of src/ and the modules it may include besides itself. An entry "wire/frame.hpp" is one header.
# Roles (relay, worker, coordinator, backbone) never include each other: they meet in wire/.
FLOORS = {
    "base": [],
    "wire": ["base"],
    "crypto": ["base"],
    "moe": ["base", "crypto"],
    "synth": ["base", "crypto", "moe"],
    "dispatch": ["base", "wire", "moe", "crypto"],
    "market": ["base", "wire", "moe", "crypto"],
    "ledger": ["base", "wire", "moe", "crypto"],
    "net": ["base", "wire"],
    "store": ["base", "market", "ledger"],
    "engine": ["base", "crypto", "moe"],
    "generate": ["base", "crypto", "engine"],
    "relay": ["base", "net", "crypto", "access", "wire/frame.hpp", "wire/attach.hpp"],
    "access": ["base", "wire", "crypto", "net"],
    "worker": ["base", "wire", "moe", "crypto", "engine", "net", "access"],
    "coordinator": ["base", "wire", "crypto", "moe", "market", "ledger", "net", "store"],
    "backbone": ["base", "wire", "moe", "crypto", "dispatch", "engine", "net", "access"],
    "plugin": ["base", "wire", "moe", "crypto", "dispatch", "engine", "net", "access", "backbone"],
    "openai": ["base", "wire", "moe", "crypto", "net", "backbone", "generate"],
    "apps": None,  # wires everything
}

# Foreign headers with an owner: pattern, what it is, and where it may be included (patterns over the path).
# Test programs may look at what they test through any library but the two that cost or couple most.
OWNERS = [
    (r"ggml-[a-z-]*impl\.h|ggml-common\.h", "ggml's internals", [r"src/plugin/"], False),
    (r"boost/(asio|beast)\b", "Asio and Beast", [r"src/net/"], False),
    (r"curl/", "libcurl", [r"src/net/"], True),
    (r"(soci/|sqlite3|libpq)", "the database", [r"src/store/"], True),
    (r"openssl/", "OpenSSL", [r"src/crypto/[^/]*\.cpp$", r"src/net/"], True),
    (r"llama(-cpp)?\.h$", "libllama", [r"src/generate/", r"src/apps/"], True),
    (r"(ggml|gguf)[a-z-]*\.h$", "ggml",
     [r"src/(moe|synth)/[^/]*\.cpp$", r"src/(engine|plugin|generate|apps)/", r"bench/"], True),
    (r"nlohmann/", "JSON",
     [r"src/(apps|openai)/.*\.cpp$", r"(_json|/inspect)\.cpp$"], True),
    (r"CLI/", "CLI11", [r"src/apps/"], True),
    (r"(gtest|gmock|rapidcheck)\b", "the test libraries", [], True),
    (r"benchmark/", "Google Benchmark", [r"bench/"], True),
]

BEAST_FILES_MAX = 3  # one such file costs 22 to 170 CPU seconds
LINES_MAX, LINES_MAX_TEST, COLUMNS_MAX = 500, 900, 100

CODE = (".cpp", ".hpp", ".c", ".h")
TEXT = CODE + (".md", ".txt", ".cmake", ".py", ".sh", ".json", ".yml", ".html", ".css", ".js")
FOLDERS = ("src", "tests", "fuzz", "bench", "tools", "cmake", "docs", "models", ".ci", "web")
TOP_FILES = ("run", "CMakeLists.txt", "CMakePresets.json", ".gitignore", ".clang-format")

# Words are written in two parts where this file would otherwise find itself.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
DETACHED = re.compile(r"(\bdetach\s*\(\s*\)|\basio::detached\b)")
STDERR = re.compile(r"fmt::print\(\s*stderr")
SLEEP = re.compile(r"\b(u|nano)?sleep\s*\(|\bsleep_(for|until)\b")
REGISTRY = re.compile(
    r"(npm" r"js\.(org|com)|yarn" r"pkg\.com|\bdeb\.deb" r"ian\.org|\bpypi\.o" r"rg|\bcrates\.i" r"o)\b")
# An exception is made in the line itself or the line above, with its reason: `// tidy: sleep, <reason>`.
EXCEPTION = re.compile(r"// tidy: (sleep|detached), \S.{9,}")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def is_test(path):
    return path.startswith("tests/") or bool(re.search(r"(_test\.cpp|_testing\.hpp|/test_[a-z_]+\.[ch]pp)$", path))


def module_of(path):
    parts = path.split("/")
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def allowed(module, header):
    floors = FLOORS[module]
    target = header.split("/")[0]
    return floors is None or target == module or target in floors or header in floors


def check_own_include(path, header, root):
    """An include in quotes that is one of ours: the floors."""
    module = module_of(path)
    target = header.split("/")[0]
    if target not in FLOORS:
        beside = os.path.join(root, os.path.dirname(path), header)
        if path.startswith("src/") and os.path.exists(beside):
            return f'"{header}" is not rooted at src/: write "{os.path.dirname(path)[4:]}/{header}"'
        return None
    if module is None or allowed(module, header):
        return None
    if is_test(path) and target == "synth":  # tests of any floor may make models
        return None
    return f"{module} may not include {header} (its floors: {', '.join(FLOORS[module]) or 'none'})"


def check_foreign_include(path, header):
    if path.startswith("fuzz/"):
        return None
    for pattern, name, places, tests_may in OWNERS:
        if not re.match(pattern, header):
            continue
        if any(re.search(place, path) for place in places) or (tests_may and is_test(path)):
            return None
        where = " or ".join(places) if places else "tests"
        return f"<{header}>: {name} may only be included in {where}"
    return None


def check_words(path, line, previous):
    found = []
    excused = {match[1] for match in (EXCEPTION.search(previous), EXCEPTION.search(line)) if match}
    if UNFINISHED.search(line):
        found.append("unfinished work is not committed: do it, or describe the limit in words")
    if REGISTRY.search(line):
        found.append("no registry host names in the tree: the client's own default serves")
    if path.endswith(CODE):
        if STDERR.search(line):
            found.append("a program goes on when nobody reads its stderr, and fmt::print throws then: apps/console.hpp "
                         "has tell()")
        if DETACHED.search(line) and "detached" not in excused:
            found.append("nothing runs detached: use a TaskGroup, or join the thread")
        if is_test(path) and SLEEP.search(line) and "sleep" not in excused:
            found.append("tests do not sleep: wait for what the other side prints, sends or signals; where only "
                         "polling or a random moment will do, say so: // tidy: sleep, <reason>")
    return found


def check_file(root, path, text):
    """Yields (line number, message)."""
    lines = text.split("\n")
    code = path.endswith(CODE)
    count = len(lines) - (1 if lines[-1] == "" else 0)
    limit = LINES_MAX_TEST if is_test(path) else LINES_MAX
    if code and count > limit:
        yield 1, f"{count} lines, at most {limit}: split the file"
    if path.endswith(".hpp") and not lines[0].startswith(("//", "/*")):
        yield 1, "a header opens with a comment: what it is, who uses it, Thread, Owns, Limits"
    if path.endswith(".hpp") and not re.search(r"^\s*#pragma once\b", text, re.M):
        yield 1, "a header has #pragma once"
    if text and not text.endswith("\n"):
        yield count, "the last line has no newline"
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            yield number, "trailing white space"
        if code and len(line) > COLUMNS_MAX:
            yield number, f"{len(line)} columns, at most {COLUMNS_MAX}"
        for message in check_words(path, line, lines[number - 2] if number > 1 else ""):
            yield number, message
        match = INCLUDE.match(line) if code else None
        if match:
            message = check_foreign_include(path, match[2])
            if message is None and match[1] == '"':
                message = check_own_include(path, match[2], root)
            if message:
                yield number, message


def list_files(root):
    for name in sorted(os.listdir(root)):
        if name in TOP_FILES or (name.endswith(".md") and os.path.isfile(os.path.join(root, name))):
            yield name
    for folder in FOLDERS:
        for directory, subdirectories, names in os.walk(os.path.join(root, folder)):
            subdirectories[:] = sorted(d for d in subdirectories if d not in ("corpus", "__pycache__"))
            for name in sorted(names):
                if name.endswith(TEXT) or name == "run":
                    yield os.path.relpath(os.path.join(directory, name), root)


def tidy(root):
    """All findings of the tree, as "FILE:LINE: message"."""
    findings, beast = [], []
    for path in list_files(root):
        module = module_of(path)
        if module is not None and module not in FLOORS:
            findings.append(f"{path}:1: module {module} has no floor: add it to FLOORS in tools/tidy.py")
            continue
        try:
            with open(os.path.join(root, path), encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError:
            findings.append(f"{path}:1: not UTF-8")
            continue
        findings += [f"{path}:{number}: {message}" for number, message in check_file(root, path, text)]
        if path.endswith(CODE) and re.search(r"^\s*#\s*include\s*<boost/beast", text, re.M):
            beast.append(path)
    if len(beast) > BEAST_FILES_MAX:
        findings.append(f"{beast[0]}:1: {len(beast)} files include Beast, at most {BEAST_FILES_MAX}: {', '.join(beast)}")
    if not os.path.isdir(os.path.join(root, "src")):
        findings.append(f"{root}:1: no src/ there: give the root of the repository")
    return findings


def main(arguments):
    root = arguments[1] if len(arguments) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    findings = tidy(root)
    for finding in findings:
        print(finding)
    print(f"tidy: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
