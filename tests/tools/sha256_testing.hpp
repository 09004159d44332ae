// SHA-256 (FIPS 180-4) for test programs that are built without OpenSSL, for other processors too.
//
// Used by kernels_digest. Thread: one object, one thread. Owns: nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvasir::testing {

class Sha256 {
public:
    void add(const void* data, size_t bytes) {
        const auto* p = static_cast<const uint8_t*>(data);
        for (size_t i = 0; i < bytes; ++i) add_byte(p[i]);
    }
    // The digest in hexadecimal; nothing may be added afterwards.
    std::string finish() {
        const uint64_t bits = bytes_ * 8;
        add_byte(0x80);
        while (bytes_ % 64 != 56) add_byte(0);
        for (int shift = 56; shift >= 0; shift -= 8) add_byte(static_cast<uint8_t>(bits >> shift));
        std::string hex;
        for (uint32_t word : state_) {
            for (int shift = 28; shift >= 0; shift -= 4) {
                hex += "0123456789abcdef"[word >> shift & 15];
            }
        }
        return hex;
    }

private:
    static constexpr uint32_t kRound[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
        0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
        0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
        0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
        0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
        0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
        0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};

    static uint32_t turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

    void add_byte(uint8_t byte) {
        block_[bytes_++ % 64] = byte;
        if (bytes_ % 64 == 0) take_block();
    }

    void take_block() {
        uint32_t w[64];
        for (size_t i = 0; i < 16; ++i) {
            const uint8_t* p = &block_[4 * i];
            w[i] = uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
        }
        for (size_t i = 16; i < 64; ++i) {
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] +
                   (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        std::array<uint32_t, 8> s = state_;
        for (size_t i = 0; i < 64; ++i) {
            const uint32_t e = s[4], a = s[0];
            const uint32_t t = s[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) +
                               ((e & s[5]) ^ (~e & s[6])) + kRound[i] + w[i];
            const uint32_t u = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) +
                               ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            s = {t + u, s[0], s[1], s[2], s[3] + t, s[4], s[5], s[6]};
        }
        for (size_t i = 0; i < 8; ++i) state_[i] += s[i];
    }

    std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> block_ = {};
    uint64_t bytes_ = 0;
};

}  // namespace kvasir::testing
