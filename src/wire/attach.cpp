#include "wire/attach.hpp"

#include "base/check.hpp"
#include "wire/fields.hpp"

namespace kvasir::wire {
namespace {

static_assert(kAttachTextMax == kTextBytesMax);

Role read_role(FieldReader& in) {
    const uint8_t value = in.u8("role");
    switch (static_cast<Role>(value)) {
        case Role::kWorker:
        case Role::kBackbone:
        case Role::kObserver:
            return static_cast<Role>(value);
    }
    in.wrong("role", std::to_string(value) + " is no role");
    return Role::kWorker;
}

uint16_t read_handle(FieldReader& in) {
    const uint16_t handle = in.u16("handle");
    if (handle == 0) in.wrong("handle", "must not be 0, which is the server");
    return handle;
}

}  // namespace

std::vector<uint8_t> attach_statement(const Nonce& nonce, Role role, const Attach& attach) {
    ByteWriter out;
    out.bytes(nonce);
    out.u8(static_cast<uint8_t>(role));
    out.u16(attach.major);
    out.u16(attach.minor);
    out.bytes(attach.node);
    put_text(out, attach.token);
    return out.take();
}

std::vector<uint8_t> encode_nonce(const Nonce& nonce) {
    ByteWriter out;
    out.bytes(nonce);
    return finish(FrameType::kNonce, 0, out);
}

std::vector<uint8_t> encode_attach(const Attach& message) {
    ByteWriter out;
    out.u16(message.major);
    out.u16(message.minor);
    out.bytes(message.node);
    put_text(out, message.token);
    out.bytes(message.signature);
    put_text(out, message.name);
    return finish(FrameType::kAttach, 0, out);
}

std::vector<uint8_t> encode_attached(const Attached& message) {
    ByteWriter out;
    out.u16(message.major);
    out.u16(message.minor);
    out.u64(message.generation);
    out.u32(message.ping_interval_ms);
    out.u64(message.message_bytes_max);
    out.u64(message.token_left_ms);
    return finish(FrameType::kAttached, 0, out);
}

std::vector<uint8_t> encode_peer_up(const PeerUp& message) {
    KVASIR_CHECK(message.handle != 0);
    ByteWriter out;
    out.u16(message.handle);
    out.u8(static_cast<uint8_t>(message.role));
    out.bytes(message.node);
    out.u64(message.generation);
    put_text(out, message.name);
    return finish(FrameType::kPeerUp, 0, out);
}

std::vector<uint8_t> encode_peer_down(const PeerDown& message) {
    KVASIR_CHECK(message.handle != 0);
    ByteWriter out;
    out.u16(message.handle);
    out.u16(message.code);
    put_text(out, message.detail);
    return finish(FrameType::kPeerDown, 0, out);
}

std::vector<uint8_t> encode_move(const Move& message) {
    ByteWriter out;
    out.u32(message.within_ms);
    put_text(out, message.url);
    return finish(FrameType::kMove, 0, out);
}

std::vector<uint8_t> encode_renew(std::string_view token, uint32_t request_id) {
    ByteWriter out;
    put_text(out, token);
    return finish(FrameType::kRenew, request_id, out);
}

Result<Nonce> decode_nonce(std::span<const uint8_t> payload) {
    FieldReader in("nonce", payload);
    auto nonce = in.array<32>("nonce");
    in.check_finished();
    return done(in, std::move(nonce));
}

Result<Attach> decode_attach(std::span<const uint8_t> payload) {
    FieldReader in("attach", payload);
    Attach value;
    value.major = in.u16("major");
    value.minor = in.u16("minor");
    if (in.failed()) return tl::unexpected(std::move(in).error());
    // Before anything else: another major version may lay out the rest differently.
    if (auto status = check_version("attach", value.major, value.minor); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    value.node = in.array<32>("node");
    value.token = in.text("token");
    value.signature = in.array<64>("signature");
    value.name = in.text("name");
    // A newer minor version may append fields; ours must end here.
    if (value.minor <= kProtocolMinor) in.check_finished();
    return done(in, std::move(value));
}

Result<Attached> decode_attached(std::span<const uint8_t> payload) {
    FieldReader in("attached", payload);
    Attached value;
    value.major = in.u16("major");
    value.minor = in.u16("minor");
    if (in.failed()) return tl::unexpected(std::move(in).error());
    if (auto status = check_version("attached", value.major, value.minor); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    value.generation = in.u64("generation");
    value.ping_interval_ms = in.u32("ping_interval_ms");
    if (value.ping_interval_ms == 0) in.wrong("ping_interval_ms", "must not be 0");
    value.message_bytes_max = in.u64("message_bytes_max");
    if (value.message_bytes_max < kFrameHeaderBytes) {
        in.wrong("message_bytes_max", "no frame is that short");
    }
    value.token_left_ms = in.u64("token_left_ms");
    if (value.minor <= kProtocolMinor) in.check_finished();
    return done(in, std::move(value));
}

Result<PeerUp> decode_peer_up(std::span<const uint8_t> payload) {
    FieldReader in("peer_up", payload);
    PeerUp value;
    value.handle = read_handle(in);
    value.role = read_role(in);
    value.node = in.array<32>("node");
    value.generation = in.u64("generation");
    value.name = in.text("name");
    in.check_finished();
    return done(in, std::move(value));
}

Result<PeerDown> decode_peer_down(std::span<const uint8_t> payload) {
    FieldReader in("peer_down", payload);
    PeerDown value;
    value.handle = read_handle(in);
    value.code = in.u16("code");
    value.detail = in.text("detail");
    in.check_finished();
    return done(in, std::move(value));
}

Result<Move> decode_move(std::span<const uint8_t> payload) {
    FieldReader in("move", payload);
    Move value;
    value.within_ms = in.u32("within_ms");
    value.url = in.text("url");
    in.check_finished();
    return done(in, std::move(value));
}

Result<std::string> decode_renew(std::span<const uint8_t> payload) {
    FieldReader in("renew", payload);
    std::string token = in.text("token");
    in.check_finished();
    return done(in, std::move(token));
}

void set_peer(std::span<uint8_t> head, uint16_t peer) {
    KVASIR_CHECK(head.size() >= kFrameHeaderBytes);
    head[2] = static_cast<uint8_t>(peer);
    head[3] = static_cast<uint8_t>(peer >> 8);
}

}  // namespace kvasir::wire
