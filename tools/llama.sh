#!/usr/bin/env bash
# llama.cpp v0.5.0 in a cache folder that outlives build/ and is shared by all clones of one user.
#
#   tools/llama.sh path             print the folder (src/ and build/ in it: what KVASIR_LLAMA_DIR wants)
#   tools/llama.sh ready [extra]    exit 0 when that stage is complete there
#   tools/llama.sh build [extra]    fetch, verify and build what is missing; prints the folder last
#
# Stages: "default" = libllama and ggml's CPU backend; "extra" = the programs and the RPC backend that tests and
# benchmarks compare with. The folder's name carries a hash of everything that changes the bits of a result (source,
# flags, compiler, instruction sets), so another machine or compiler gets another folder and never a stale one.
# A lock keeps two builds apart; a stamp per stage is written last, so an interrupted build is taken up again.
set -euo pipefail

readonly npm_package=node-llama-cpp npm_version=3.22.1 llama_version=0.5.0
readonly npm_sha512=bltIipuWmc123H7tMIgDGKSsSrhmhlQYeVUC48XTjVW7XGJJiJJyCdlTMzQ/LiWoPkGDpcL4FviDpgw7qfTiDw==
readonly git_head=de3ff815ea7d559ee917f063901b8986f038abc6
readonly default_targets=(llama ggml ggml-cpu)
readonly extra_targets=(llama-server llama-cli llama-bench llama-perplexity llama-quantize test-llama-archs
                        ggml-rpc-server ggml-rpc)

cxx=${CXX:-c++}
cc=${CC:-cc}
jobs=${KVASIR_JOBS:-$(nproc)}
home=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
cache=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/kvasir}

say() { printf 'llama.cpp: %s\n' "$*" >&2; }
die() { say "$*"; exit 4; }

# run_logged LOG COMMAND...: quiet when it works, the end of the log when it does not.
run_logged() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 </dev/null && return
    tail -n 30 "$log" >&2
    die "failed: $* (whole log: $log)"
}

cpu_macros() { "$cxx" "$1" -dM -E -x c++ /dev/null 2>/dev/null; }

# One ggml option per instruction set that this CPU and this compiler have in common (the compiler asks the CPU itself).
# GGML_NATIVE is of no use: ggml refuses it for loadable backends, and with gcc 12 it would switch AMX on, whose kernels
# die with SIGILL there: that compiler's _tile_loadconfig lets part of the tile configuration be dropped as a dead store.
# So AMX stays off everywhere; repacked buffers, its only users, are not used by the reference either.
isa_flags() {
    local macros option needs need on
    case $(uname -m) in
    x86_64 | i?86)
        macros=$(cpu_macros -march=native) || die "$cxx -march=native failed: is $cxx a working C++ compiler?"
        while read -r option needs; do
            on=ON
            for need in $needs; do [[ $macros == *"#define __${need}__ "* ]] || on=OFF; done
            printf -- '-DGGML_%s=%s\n' "$option" "$on"
        done <<-'TABLE'
		SSE42 SSE4_2
		AVX AVX
		AVX2 AVX2
		FMA FMA
		F16C F16C
		BMI2 BMI2
		AVX_VNNI AVXVNNI
		AVX512 AVX512F AVX512CD AVX512VL AVX512DQ AVX512BW
		AVX512_VBMI AVX512VBMI
		AVX512_VNNI AVX512VNNI
		AVX512_BF16 AVX512BF16
		TABLE
        printf -- '-DGGML_AMX_%s=OFF\n' TILE INT8 BF16
        ;;
    aarch64 | arm64)
        local arch=armv8-a
        macros=$(cpu_macros -mcpu=native) || macros=
        [[ $macros == *__ARM_FEATURE_FP16_VECTOR_ARITHMETIC* ]] && arch=armv8.2-a+fp16
        [[ $arch != armv8-a && $macros == *__ARM_FEATURE_DOTPROD* ]] && arch+=+dotprod
        [[ $arch == *dotprod && $macros == *__ARM_FEATURE_MATMUL_INT8* ]] && arch+=+i8mm
        [[ $arch == *dotprod && $macros == *__ARM_FEATURE_SVE* ]] && arch+=+sve
        printf -- '-DGGML_CPU_ARM_ARCH=%s\n' "$arch"
        ;;
    esac
}

set_flags() {
    command -v "$cxx" >/dev/null || die "no C++ compiler ($cxx): install g++, or set CXX"
    local isa
    isa=$(isa_flags)
    mapfile -t isa_options <<<"$isa"
    flags=(
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF
        # OpenMP's threads spin at barriers: several processes on a few cores would run up to ten times slower.
        -DGGML_OPENMP=OFF -DGGML_RPC=ON -DGGML_CCACHE=OFF
        # Nothing may be downloaded while building or testing.
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_IS_DEV=OFF
        ${isa_options[@]+"${isa_options[@]}"}
    )
    key=$({ printf '%s\n' "$git_head" "${flags[@]}"; uname -m; "$cxx" --version | head -n 1; } | sha256sum | cut -c1-12)
    dir=$cache/llama.cpp-v$llama_version-$key
}

ready() { [[ -e $dir/complete-default ]] && { [[ $1 == default ]] || [[ -e $dir/complete-$1 ]]; }; }

sha512_base64() {
    local hex
    hex=$(sha512sum "$1" | cut -c1-128)
    # shellcheck disable=SC2059  # the escapes are the data
    printf "$(sed 's/../\\x&/g' <<<"$hex")" | base64 -w 0
}

# The package through npm's own client. The hash pinned above is what vouches for the bytes, so a certificate that this
# system does not know (a company's proxy, say) is no reason to give up.
fetch() {
    local tgz=$1 work=$2 log=$2/npm.log pack
    if [[ -e $tgz ]]; then
        [[ $(sha512_base64 "$tgz") == "$npm_sha512" ]] && return
        rm -f "$tgz"
    fi
    command -v npm >/dev/null || die "npm is missing: it fetches the source ($npm_package $npm_version)"
    say "fetching its source ($npm_package $npm_version, 36 MB)"
    pack=(npm pack --ignore-scripts --loglevel=error --pack-destination "$work" "$npm_package@$npm_version")
    if ! "${pack[@]}" --fetch-retries=0 >"$log" 2>&1 </dev/null; then
        if grep -qiE 'CERT|ISSUER' "$log"; then
            say "the npm registry's certificate is not known here; going on, the pinned SHA-512 decides"
            pack+=(--strict-ssl=false)
        fi
        if ! "${pack[@]}" >"$log" 2>&1 </dev/null; then
            tail -n 15 "$log" >&2
            die "npm could not fetch $npm_package $npm_version: check the network, then run this again"
        fi
    fi
    [[ $(sha512_base64 "$work/$npm_package-$npm_version.tgz") == "$npm_sha512" ]] ||
        die "$npm_package-$npm_version.tgz does not have the pinned SHA-512: refusing to use it"
    mv "$work/$npm_package-$npm_version.tgz" "$tgz"
}

make_source() {
    local work=$dir/tmp head
    rm -rf "$work" "$dir/src" "$dir/build"
    mkdir -p "$work"
    fetch "$cache/$npm_package-$npm_version.tgz" "$work"
    tar -xzf "$cache/$npm_package-$npm_version.tgz" -C "$work" package/llama/gitRelease.bundle
    command -v git >/dev/null || die "git is missing: the source comes as a git bundle"
    run_logged "$work/clone.log" git -c advice.detachedHead=false clone -q "$work/package/llama/gitRelease.bundle" "$work/src"
    head=$(git -C "$work/src" rev-parse HEAD)
    [[ $head == "$git_head" ]] || die "its source is commit $head, expected $git_head"
    mv "$work/src" "$dir/src"
    rm -rf "$work"
    echo "$git_head" >"$dir/complete-source"
}

build_stage() {
    local stage=$1 targets=("${default_targets[@]}") start=$SECONDS
    [[ $stage == extra ]] && targets=("${extra_targets[@]}")
    say "building stage '$stage' with $jobs jobs in $dir (once; about $2 on two cores)"
    CC=$cc CXX=$cxx run_logged "$dir/configure.log" cmake -S "$dir/src" -B "$dir/build" -G Ninja "${flags[@]}"
    run_logged "$dir/build-$stage.log" ninja -C "$dir/build" -j "$jobs" "${targets[@]}"
    printf '%s\n' "${flags[@]}" >"$dir/complete-$stage"
    say "stage '$stage' done in $((SECONDS - start)) s"
}

build() {
    ready "$1" && return
    mkdir -p "$dir" 2>/dev/null || die "cannot write to $cache: set KVASIR_CACHE to a folder of yours"
    exec 9>"$cache/lock"
    if ! flock -n 9; then
        say "another build holds $cache/lock: waiting for it"
        flock 9
    fi
    [[ -e $dir/complete-source ]] || make_source
    [[ -e $dir/complete-default ]] || build_stage default "2 minutes"
    [[ $1 == default || -e $dir/complete-$1 ]] || build_stage "$1" "4 minutes"
    exec 9>&-
}

stage=${2:-default}
[[ $stage == default || $stage == extra ]] || { say "no such stage: $stage (default or extra)"; exit 2; }
case ${1:-} in
path) set_flags; echo "$dir" ;;
ready) set_flags; ready "$stage" ;;
build) set_flags; build "$stage"; echo "$dir" ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
