#!/usr/bin/env python3
"""Feeds tidy.py trees with one defect each, and a clean one: every rule must fire, and only where it should."""

import os
import tempfile
import unittest

import tidy

HEADER = "// What it is.\n#pragma once\n"


def findings(files):
    with tempfile.TemporaryDirectory() as root:
        for path, text in {"src/base/ok.hpp": HEADER, **files}.items():
            full = os.path.join(root, path)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "wb") as file:
                file.write(text if isinstance(text, bytes) else text.encode())
        return tidy.tidy(root)


def include(header):
    return f"#include {header}\n"


class Tidy(unittest.TestCase):
    def one(self, path, text, words):
        found = findings({path: text})
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(path + ":"), found)
        self.assertIn(words, found[0])

    def none(self, path, text):
        self.assertEqual(findings({path: text}), [])

    def test_floors(self):
        for path, header, good in [
            ("src/base/a.cpp", '"wire/frame.hpp"', False),
            ("src/wire/a.cpp", '"base/result.hpp"', True),
            ("src/wire/a.cpp", '"net/listener.hpp"', False),
            ("src/wire/a_test.cpp", '"net/listener.hpp"', False),
            ("src/wire/a_test.cpp", '"synth/synth.hpp"', True),
            ("src/relay/a.cpp", '"wire/frame.hpp"', True),
            ("src/relay/a.cpp", '"wire/messages.hpp"', False),
            ("src/worker/a.cpp", '"backbone/hub.hpp"', False),
            ("src/backbone/a.cpp", '"worker/worker.hpp"', False),
            ("src/coordinator/a.cpp", '"engine/weights.hpp"', False),
            ("src/worker/a.cpp", '"worker/worker.hpp"', True),
            ("src/apps/run.cpp", '"plugin/plugin.hpp"', True),
            ("tests/e2e/a.cpp", '"backbone/hub.hpp"', True),
        ]:
            with self.subTest(path=path, header=header):
                if good:
                    self.none(path, include(header))
                else:
                    self.one(path, include(header), "may not include")

    def test_foreign_owners(self):
        for path, header, good in [
            ("src/plugin/a.cpp", '"ggml-backend-impl.h"', True),
            ("src/engine/a.cpp", '"ggml-backend-impl.h"', False),
            ("src/engine/a_test.cpp", '"ggml-backend-impl.h"', False),
            ("src/engine/a.cpp", '"ggml-cpu.h"', True),
            ("src/worker/a.cpp", "<ggml.h>", False),
            ("src/moe/a.cpp", "<gguf.h>", True),
            ("src/moe/a.hpp", "<gguf.h>", False),
            ("src/moe/test_files.hpp", "<gguf.h>", True),
            ("src/net/a.cpp", "<boost/asio/io_context.hpp>", True),
            ("src/worker/a.cpp", "<boost/asio/io_context.hpp>", False),
            ("tests/e2e/a.cpp", "<boost/beast/websocket.hpp>", False),
            ("src/generate/a.cpp", "<llama.h>", True),
            ("src/backbone/a.cpp", "<llama.h>", False),
            ("src/apps/inspect.cpp", "<nlohmann/json.hpp>", True),
            ("src/apps/report.hpp", "<nlohmann/json.hpp>", False),
            ("src/moe/manifest_json.cpp", "<nlohmann/json.hpp>", True),
            ("src/moe/manifest.cpp", "<nlohmann/json.hpp>", False),
            ("src/apps/main.cpp", "<CLI/CLI.hpp>", True),
            ("src/synth/a.cpp", "<CLI/CLI.hpp>", False),
            ("src/crypto/hash.cpp", "<openssl/evp.h>", True),
            ("src/wire/hash.cpp", "<openssl/evp.h>", False),
            ("src/base/a_test.cpp", "<gtest/gtest.h>", True),
            ("src/base/a.cpp", "<gtest/gtest.h>", False),
            ("bench/a.cpp", "<benchmark/benchmark.h>", True),
            ("src/base/a.cpp", "<benchmark/benchmark.h>", False),
        ]:
            with self.subTest(path=path, header=header):
                text = (HEADER if path.endswith(".hpp") else "") + include(header)
                if good:
                    self.none(path, text)
                else:
                    self.one(path, text, "may only be included in")

    def test_includes_are_rooted_at_src(self):
        self.one("src/base/a.cpp", include('"ok.hpp"'), "not rooted at src/")

    def test_unknown_module(self):
        self.one("src/helpers/a.cpp", "", "has no floor")

    def test_beast_is_contained(self):
        text = include("<boost/beast/core.hpp>")
        self.assertEqual(findings({f"src/net/{n}.cpp": text for n in "abc"}), [])
        self.assertIn("4 files include Beast", findings({f"src/net/{n}.cpp": text for n in "abcd"})[0])

    def test_sizes(self):
        self.none("src/base/a.cpp", "\n" * 500)
        self.one("src/base/a.cpp", "\n" * 501, "split the file")
        self.none("src/base/a_test.cpp", "\n" * 900)
        self.one("src/base/a_test.cpp", "\n" * 901, "split the file")
        self.none("src/base/a.cpp", "x" * 100 + "\n")
        self.one("src/base/a.cpp", "x" * 101 + "\n", "columns")
        self.none("docs/a.md", "x" * 300 + "\n")

    def test_headers(self):
        self.one("src/base/a.hpp", "#pragma once\n", "opens with a comment")
        self.one("src/base/a.hpp", "// What it is.\n", "#pragma once")

    def test_white_space_and_encoding(self):
        self.one("src/base/a.cpp", "int a; \n", "trailing")
        self.one("README.md", "words\t\n", "trailing")
        self.one("src/base/a.cpp", "int a;", "no newline")
        self.one("src/base/a.cpp", b"\xff\n", "not UTF-8")

    def test_words(self):
        self.one("src/base/a.cpp", "// TO" "DO later\n", "unfinished")
        self.one("docs/a.md", "FIX" "ME\n", "unfinished")
        self.one("src/base/a.cpp", "thread.detach();\n", "detached")
        self.one("src/net/a.cpp", "co_spawn(io, f, asio::detached);\n", "detached")
        self.one("src/base/a_test.cpp", "std::this_thread::sleep_for(1s);\n", "do not sleep")
        self.one("tests/e2e/a.cpp", "usleep(5);\n", "do not sleep")
        self.none("src/net/a.cpp", "std::this_thread::sleep_for(backoff);\n")
        self.one("tools/a.sh", "curl https://registry.npm" "js.org/a\n", "registry")
        self.one("run", "deb http://deb.deb" "ian.org/debian bookworm\n", "registry")

    def test_exceptions_need_their_reason(self):
        sleep = "usleep(5);"
        self.none("src/base/a_test.cpp", sleep + "  // tidy: sleep, a random moment to kill at\n")
        self.none("src/base/a_test.cpp", "// tidy: sleep, polls the child's state\n" + sleep + "\n")
        self.one("src/base/a_test.cpp", sleep + "  // tidy: sleep, ok\n", "do not sleep")
        self.one("src/base/a_test.cpp", sleep + "  // tidy: detached, polls the child's state\n", "do not sleep")
        self.one("src/base/a_test.cpp", "// tidy: sleep, polls the child's state\n\n" + sleep + "\n", "do not sleep")
        self.none("src/net/a.cpp", "thread.detach();  // tidy: detached, getaddrinfo cannot be stopped\n")

    def test_wrong_root(self):
        with tempfile.TemporaryDirectory() as root:
            self.assertEqual(len(tidy.tidy(root)), 1)


if __name__ == "__main__":
    unittest.main()
