#!/usr/bin/env bash
# Compiles the expert kernels to WebAssembly: src/engine/kernels/kernels_wasm.cpp says what the module exports.
#
#   tools/wasm.sh OUT.wasm    needs clang++ and wasm-ld (Debian: clang, lld); no Emscripten, no C library
set -euo pipefail
[[ $# == 1 ]] || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for program in clang++ wasm-ld; do
    command -v $program >/dev/null || { echo "wasm: $program is missing (Debian: clang, lld)" >&2; exit 4; }
done
mkdir -p "$(dirname "$out")"
# Products are fused only where the source says so; nothing here may assume that numbers are finite.
clang++ --target=wasm32 -std=c++20 -O3 -msimd128 -mbulk-memory -ffreestanding -nostdlib -fno-exceptions -fno-rtti -ffp-contract=off \
    -Wall -Wextra -Werror -Wshadow -Isrc -Wl,--no-entry -Wl,--strip-all -Wl,-z,stack-size=65536 \
    -o "$out" src/engine/kernels/kernels_wasm.cpp
