// Fuzz target: bodies of the market's API. The first byte chooses the decoder, the rest is JSON.
//
// Whatever the bytes are, the answer is a value within its documented bounds or kBadInput with a
// reason.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "coordinator/messages.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::coordinator;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "market_fuzz: %s\n", what);
    std::abort();
}

template <class T>
bool is_good(const Result<T>& result) {
    if (result) return true;
    require(result.error().code == Errc::kBadInput, "an error of another kind");
    require(!result.error().detail.empty(), "an error without a reason");
    return false;
}

void decode(uint8_t which, std::string_view body) {
    switch (which % 9) {
        case 0:
            if (const auto out = decode_enroll(body); is_good(out)) {
                require(out->challenge.size() <= 256, "a long challenge");
            }
            break;
        case 1:
            is_good(decode_renew(body));
            break;
        case 2:
            if (const auto out = decode_ask(body); is_good(out)) {
                require(out->have.size() <= kSegmentsMax, "too many segments");
                require(out->begun.size() <= kSegmentsMax, "too many segments begun");
                require(out->budget_bytes <= uint64_t{INT64_MAX}, "a large budget");
            }
            break;
        case 3:
            if (const auto out = decode_progress(body); is_good(out)) {
                require(out->size() <= kIdsMax, "too many reports");
            }
            break;
        case 4:
            if (const auto out = decode_prove(body); is_good(out)) {
                require(out->nonce.has_value() == out->leases.empty(), "neither or both");
                require(out->answers.size() <= kAnswersMax, "too many answers");
            }
            break;
        case 5:
            if (const auto out = decode_heartbeat(body); is_good(out)) {
                require(out->size() <= kIdsMax, "too many ids");
            }
            break;
        case 6:
            is_good(decode_release(body));
            break;
        case 7:
            if (const auto out = decode_invite(body); is_good(out)) {
                require(out->uses >= 1 && out->uses <= kInviteUsesMax, "uses out of range");
                require(out->valid_for <= kInviteLifeMax, "a long life");
            }
            break;
        default:
            is_good(decode_revoke(body));
            break;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    decode(data[0], {reinterpret_cast<const char*>(data) + 1, size - 1});
    return 0;
}
