// The sending half of MessageStream.
#include <poll.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "net/message_stream_impl.hpp"
#include "net/socket_wait.hpp"

namespace kvasir::net {
namespace {

using wire::WsHeader;
using wire::WsOpcode;

constexpr size_t kPiecesDirectMax = 15;       // more are copied before they are sent
constexpr size_t kBlockBytesMin = 128 << 10;  // copying less costs less than a new buffer

// Is a message kept in the buffer that it arrived in, or copied? What is appended holds twice its
// bytes at most, until the last of them is sent.
bool is_worth_its_buffer(size_t bytes, size_t buffer_bytes) {
    return bytes >= kBlockBytesMin && bytes >= buffer_bytes / 2;
}

}  // namespace

Error MessageStream::Impl::write_failed(Error error) {
    write_closed = true;
    unsent.clear();
    ping_owed.reset();
    return error;
}

// Half a frame cannot be taken back: no more is sent.
Status MessageStream::Impl::out_of_memory() {
    return tl::unexpected(
        write_failed({Errc::kEnvironment, "no memory for bytes that the peer does not take"}));
}

// At most `bytes_max` (not 0) of them; 0 when the kernel takes nothing now.
Result<uint64_t> MessageStream::Impl::send_some(std::span<iovec> vectors, uint64_t bytes_max) {
    uint64_t bytes = 0;
    size_t count = 0;
    while (count < vectors.size() && bytes < bytes_max) bytes += vectors[count++].iov_len;
    const uint64_t over = bytes - std::min(bytes, bytes_max);
    if (count != 0) vectors[count - 1].iov_len -= over;
    auto sent = transport.write(vectors.first(count));
    if (count != 0) vectors[count - 1].iov_len += over;
    if (!sent) return tl::unexpected(write_failed(std::move(sent.error())));
    counters.bytes_out += *sent;
    return sent;
}

// Sends `vectors` from where they lie; what the kernel does not take is copied to `unsent`.
Status MessageStream::Impl::send_direct(std::span<iovec> vectors) {
    uint64_t turn = limits.send_bytes_per_call;
    while (!vectors.empty() && turn != 0) {
        auto sent = send_some(vectors, turn);
        if (!sent) return tl::unexpected(std::move(sent.error()));
        turn -= *sent;
        uint64_t left = *sent;
        while (!vectors.empty() && left >= vectors.front().iov_len) {
            left -= vectors.front().iov_len;
            vectors = vectors.subspan(1);
        }
        if (vectors.empty()) return {};
        vectors.front().iov_base = static_cast<uint8_t*>(vectors.front().iov_base) + left;
        vectors.front().iov_len -= left;
        if (*sent == 0) break;
    }
    bool kept = true;
    for (const iovec& vector : vectors) {
        kept =
            kept && unsent.append({static_cast<const uint8_t*>(vector.iov_base), vector.iov_len});
    }
    return kept ? Status() : out_of_memory();
}

Status MessageStream::Impl::send_frame(WsOpcode opcode,
                                       std::span<const std::span<const uint8_t>> pieces,
                                       MessageReader* source) {
    WsHeader header;
    header.opcode = opcode;
    header.masked = side == Side::kClient;  // with the zero key: docs/protocol.md says why
    for (const auto& piece : pieces) header.payload_bytes += piece.size();
    std::array<uint8_t, wire::kWsHeaderBytesMax> head;
    const size_t head_bytes = wire::encode_ws_header(header, head);

    const bool in_one_turn = header.payload_bytes <= limits.send_bytes_per_call;
    if (unsent.empty() && in_one_turn && pieces.size() <= kPiecesDirectMax) {
        std::array<iovec, kPiecesDirectMax + 1> vectors;
        size_t count = 0;
        vectors[count++] = {head.data(), head_bytes};
        for (const auto& piece : pieces) {
            if (piece.empty()) continue;
            vectors[count++] = {const_cast<uint8_t*>(piece.data()), piece.size()};
        }
        return send_direct({vectors.data(), count});
    }
    bool kept = unsent.append({head.data(), head_bytes});
    for (const auto& piece : pieces) {
        Block block;
        const bool last = &piece == &pieces.back();
        if (source != nullptr && last && is_worth_its_buffer(piece.size(), source->capacity())) {
            block = source->take_block();
        }
        if (block) {
            unsent.append(piece, std::move(block));
        } else {
            kept = kept && unsent.append(piece);
        }
    }
    if (!kept) return out_of_memory();
    return sends_in_turns() ? Status() : flush();
}

Status MessageStream::Impl::flush() {
    if (transport.wants_write()) {
        auto status = transport.flush();
        if (!status) return tl::unexpected(write_failed(std::move(status.error())));
    }
    for (uint64_t turn = limits.send_bytes_per_call; !unsent.empty() && turn != 0;) {
        std::array<iovec, 16> vectors;
        const size_t count = unsent.gather(vectors);
        auto sent = send_some({vectors.data(), count}, turn);
        if (!sent) return tl::unexpected(std::move(sent.error()));
        if (*sent == 0) break;
        turn -= *sent;
        unsent.consume(*sent);
    }
    if (ping_owed && !write_closed) send_owed_pong();
    return {};
}

void MessageStream::Impl::send_owed_pong() {
    if (counters.bytes_out < pong_sent_at) return;
    const std::vector<uint8_t> payload = std::move(*ping_owed);
    ping_owed.reset();
    const std::span<const uint8_t> piece(payload);
    // A failure shows as write_closed; reading goes on.
    if (send_frame(WsOpcode::kPong, {&piece, 1})) pong_sent_at = counters.bytes_out + unsent.size();
}

// ---- the public face ----

Status MessageStream::enqueue(std::span<const std::span<const uint8_t>> pieces) {
    return enqueue(pieces, nullptr);
}

Status MessageStream::pass_on(std::span<const std::span<const uint8_t>> pieces,
                              MessageStream& from) {
    return enqueue(pieces, from.impl_.get());
}

Status MessageStream::enqueue(std::span<const std::span<const uint8_t>> pieces, Impl* from) {
    if (closed()) return fail(Errc::kClosed, "the connection is closed");
    uint64_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.size();
    const uint64_t unsent_max = impl_->limits.unsent_bytes_max;
    if (bytes > std::min(impl_->limits.message_bytes_max, unsent_max)) {
        return fail(Errc::kLimit, "message of " + std::to_string(bytes) +
                                      " bytes is over the limit of the connection");
    }
    if (!impl_->sends_in_turns() || impl_->unsent.empty()) {
        if (auto status = impl_->flush(); !status) return status;
    }
    if (impl_->unsent.size() > unsent_max - bytes) {
        return fail(Errc::kBusy, "the peer reads too slowly: " +
                                     std::to_string(impl_->unsent.size()) + " bytes are unsent");
    }
    auto status =
        impl_->send_frame(WsOpcode::kBinary, pieces, from == nullptr ? nullptr : &from->reader);
    if (status) ++impl_->counters.messages_out;
    return status;
}

Status MessageStream::enqueue(std::span<const uint8_t> message) {
    return enqueue(std::span<const std::span<const uint8_t>>(&message, 1));
}

Status MessageStream::enqueue_ping() {
    if (closed()) return fail(Errc::kClosed, "the connection is closed");
    if (auto status = impl_->flush(); !status) return status;
    if (impl_->unsent.size() >= impl_->limits.unsent_bytes_max) {
        return fail(Errc::kBusy, "the peer reads too slowly");
    }
    return impl_->send_frame(WsOpcode::kPing, {});
}

Status MessageStream::flush() {
    if (closed()) return fail(Errc::kClosed, "the connection is closed");
    return impl_->flush();
}

Status MessageStream::flush_until(Deadline deadline) {
    while (true) {
        if (auto status = flush(); !status) return status;
        if (!wants_write()) return {};
        auto ready = wait_for(fd(), POLLOUT, deadline);
        if (!ready) return tl::unexpected(std::move(ready.error()));
        if (!*ready) return fail(Errc::kTimeout, "the peer did not take the bytes in time");
    }
}

}  // namespace kvasir::net
