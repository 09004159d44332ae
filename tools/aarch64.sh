#!/usr/bin/env bash
# What the worker for 64-bit ARM is linked from, as static libraries in a cache folder: ggml, OpenSSL and libcurl.
#
#   tools/aarch64.sh build    make what is missing; prints the folder last (what KVASIR_AARCH64_DIR wants)
#
# OpenSSL comes compiled from Debian's arm64 package; libcurl is compiled from Debian's source package with HTTP and TLS
# alone, because the packaged static library wants a dozen others that have no static form. Both are fetched with apt
# into folders of their own: nothing is installed for arm64 on this machine. ggml is compiled from the same source as
# the native one (tools/llama.sh) for plain armv8-a, so that every 64-bit phone can run it; KVASIR_ARM_ARCH=armv8.2-a+dotprod
# (or what GCC's -march takes) makes a faster one for newer processors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly triple=aarch64-linux-gnu
arch=${KVASIR_ARM_ARCH:-armv8-a}
jobs=${KVASIR_JOBS:-$(nproc)}
home=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
cache=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/kvasir}

say() { printf 'aarch64: %s\n' "$*" >&2; }
die() { say "$*"; exit 4; }

run_logged() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 </dev/null && return
    tail -n 30 "$log" >&2
    die "failed: $* (whole log: $log)"
}

command -v $triple-g++ >/dev/null || die "$triple-g++ is missing (Debian: g++-$triple)"
llama=$(tools/llama.sh build)
readonly recipe=1  # grows when what is made changes
key=$({ echo "$arch $recipe"; cat "$llama/complete-source"; $triple-g++ --version | head -n 1; } | sha256sum | cut -c1-12)
dir=$cache/$triple-$key

# apt with lists and downloads in our own folder, for arm64 and for sources, from the mirrors this machine uses.
set_up_apt() {
    local apt=$dir/apt mirror
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -n 1)
    [[ -n $mirror ]] || die "apt knows no mirror of Debian on this machine"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    printf '%s [signed-by=%s] %s bookworm main\n' deb "$keyring" "$mirror" deb-src "$keyring" "$mirror" >"$apt/sources.list"
    apt_options=(-q -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$apt/lists"
        -o "Dir::Cache=$apt/cache" -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root)
    run_logged "$dir/apt-update.log" apt-get "${apt_options[@]}" update
}

make_openssl() {
    [[ -e $dir/lib/libssl.a ]] && return
    local work=$dir/openssl
    rm -rf "$work" && mkdir -p "$work"
    (cd "$work" && run_logged "$dir/openssl.log" apt-get "${apt_options[@]}" download libssl-dev)
    dpkg-deb -x "$work"/libssl-dev_*.deb "$work/root"
    cp -r "$work/root/usr/include/openssl" "$dir/include/"
    cp -r "$work/root/usr/include/$triple/openssl/." "$dir/include/openssl/"
    cp "$work/root/usr/lib/$triple/libcrypto.a" "$work/root/usr/lib/$triple/libssl.a" "$dir/lib/"
    rm -rf "$work"
}

make_curl() {
    [[ -e $dir/lib/libcurl.a ]] && return
    local work=$dir/curl
    rm -rf "$work" && mkdir -p "$work"
    (cd "$work" && run_logged "$dir/curl-source.log" apt-get "${apt_options[@]}" source --download-only curl)
    mkdir "$work/src" && tar -xzf "$work"/curl_*.orig.tar.gz -C "$work/src" --strip-components=1
    (cd "$work/src" && CPPFLAGS="-I$dir/include" LDFLAGS="-L$dir/lib" LIBS="-lpthread -ldl" run_logged "$dir/curl-configure.log" \
        ./configure --host=$triple --prefix="$dir" --disable-shared --enable-static --with-openssl="$dir" --disable-manual \
        --with-ca-path=/etc/ssl/certs --without-ca-bundle --disable-{ldap,ldaps,rtsp,dict,telnet,tftp,pop3,imap,smb,smtp,gopher,mqtt,ftp,file,ntlm,tls-srp,alt-svc} \
        --without-{zlib,brotli,zstd,libpsl,libidn2,nghttp2,librtmp,libssh2,gssapi})
    run_logged "$dir/curl-build.log" make -C "$work/src/lib" -j "$jobs" install
    run_logged "$dir/curl-include.log" make -C "$work/src/include" install
    rm -rf "$work"
}

make_ggml() {
    [[ -e $dir/lib/libggml-cpu.a ]] && return
    say "building ggml for $arch"
    run_logged "$dir/ggml-configure.log" cmake -S "$llama/src" -B "$dir/ggml" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=$triple-gcc -DCMAKE_CXX_COMPILER=$triple-g++ \
        -DBUILD_SHARED_LIBS=OFF -DGGML_STATIC=ON -DGGML_BACKEND_DL=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF \
        -DGGML_LLAMAFILE=ON -DGGML_CPU_ARM_ARCH="$arch" -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_IS_DEV=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    run_logged "$dir/ggml-build.log" ninja -C "$dir/ggml" -j "$jobs" ggml ggml-base ggml-cpu
    find "$dir/ggml" -name 'libggml*.a' -exec cp {} "$dir/lib/" \;
    rm -rf "$dir/ggml"
}

build() {
    [[ -e $dir/complete ]] && return
    mkdir -p "$dir/include" "$dir/lib" 2>/dev/null || die "cannot write to $cache: set KVASIR_CACHE to a folder of yours"
    exec 9>"$cache/lock"
    flock 9
    say "making OpenSSL, libcurl and ggml for 64-bit ARM in $dir (once; about 3 minutes on two cores)"
    set_up_apt
    make_openssl
    # Its configure keeps one core busy for a minute: ggml has the other. Whatever fails, nothing goes on in $dir.
    make_curl &
    local curl=$!
    trap 'kill $curl 2>/dev/null; wait' EXIT
    make_ggml
    wait $curl || exit 4
    trap - EXIT
    rm -rf "$dir/apt"
    touch "$dir/complete"
    exec 9>&-
}

case ${1:-} in
build) build; echo "$dir" ;;
*) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
