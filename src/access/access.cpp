#include "access/access.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "base/log.hpp"
#include "wire/messages.hpp"

namespace kvasir::access {
namespace {

uint8_t role_bit(wire::Role role) {
    switch (role) {
        case wire::Role::kWorker:
            return crypto::kRoleWorker;
        case wire::Role::kBackbone:
            return crypto::kRoleBackbone;
        case wire::Role::kObserver:
            return crypto::kRoleObserver;
    }
    return 0;
}

// The next frame, which must be of that type; an ERROR becomes our error.
Result<std::vector<uint8_t>> expect(net::MessageStream& stream, wire::FrameType type,
                                    net::Deadline deadline) {
    auto message = stream.receive(deadline);
    if (!message) return tl::unexpected(message.error());
    auto frame = wire::decode_frame(*message);
    if (!frame) return tl::unexpected(frame.error());
    if (frame->header.type == wire::FrameType::kError) {
        auto error = wire::decode_error(frame->payload);
        if (!error) return tl::unexpected(error.error());
        return fail(error->code, "refused: " + printable(error->detail, 500));
    }
    if (frame->header.type != type) {
        return fail(Errc::kProtocol, "the server sent a frame of type " +
                                         std::to_string(static_cast<int>(frame->header.type)) +
                                         " in place of type " +
                                         std::to_string(static_cast<int>(type)));
    }
    return std::vector<uint8_t>(frame->payload.begin(), frame->payload.end());
}

Result<Attachment> handshake(net::MessageStream stream, wire::Role role,
                             const Credentials& credentials, net::Deadline deadline) {
    auto first = expect(stream, wire::FrameType::kNonce, deadline);
    if (!first) {
        if (first.error().code != Errc::kTimeout) return tl::unexpected(first.error());
        return fail(Errc::kProtocol,
                    "the server did not ask for a token: a backbone's own port takes --connect");
    }
    auto nonce = wire::decode_nonce(*first);
    if (!nonce) return tl::unexpected(nonce.error());
    const std::array<uint8_t, 1> role_byte = {static_cast<uint8_t>(role)};
    if (Status ok = stream.enqueue(role_byte); !ok) return tl::unexpected(ok.error());
    const auto message = wire::encode_attach(make_attach(*nonce, role, credentials));
    if (Status ok = stream.enqueue(message); !ok) return tl::unexpected(ok.error());
    if (Status ok = stream.flush_until(deadline); !ok) return tl::unexpected(ok.error());
    auto reply = expect(stream, wire::FrameType::kAttached, deadline);
    if (!reply) return tl::unexpected(reply.error());
    auto attached = wire::decode_attached(*reply);
    if (!attached) return tl::unexpected(attached.error());
    return Attachment{std::move(stream), *attached};
}

}  // namespace

wire::Attach make_attach(const wire::Nonce& nonce, wire::Role role,
                         const Credentials& credentials) {
    wire::Attach attach;
    attach.node = credentials.key->public_key().bytes;
    attach.token = credentials.token;
    attach.name = credentials.name.substr(0, wire::kAttachTextMax);
    attach.signature =
        credentials.key->sign(wire::kAttachContext, wire::attach_statement(nonce, role, attach));
    return attach;
}

Result<Attachment> attach(const AttachOptions& options, const Credentials& credentials) {
    const auto deadline = net::Clock::now() + options.handshake.deadline;
    auto stream = net::dial(options.endpoint, options.handshake, options.messages, options.tls);
    if (!stream) return tl::unexpected(stream.error());
    return handshake(std::move(*stream), options.role, credentials, deadline);
}

Status check_signature(const wire::Attach& attach, wire::Role role, const wire::Nonce& nonce) {
    if (crypto::verify(crypto::PublicKey{attach.node}, wire::kAttachContext,
                       wire::attach_statement(nonce, role, attach), attach.signature)) {
        return {};
    }
    return fail(Errc::kDenied,
                "the signature is not by the node's key over this connection's nonce");
}

Result<crypto::TokenClaims> check(const wire::Attach& attach, wire::Role role,
                                  const wire::Nonce* nonce, const crypto::PublicKey& market,
                                  crypto::WallTime now, std::chrono::seconds leeway) {
    if (attach.major != wire::kProtocolMajor) {
        return fail(Errc::kVersion, "the node speaks protocol " + std::to_string(attach.major) +
                                        ", this server " + std::to_string(wire::kProtocolMajor) +
                                        ": update the older one");
    }
    if (attach.token.empty()) {
        return fail(Errc::kDenied, "no token: ask the market for one (kvasir worker --invite)");
    }
    auto claims = crypto::open_token(attach.token, market);
    if (!claims) return claims;
    if (Status ok = crypto::check_time(*claims, now, leeway); !ok)
        return tl::unexpected(ok.error());
    if (claims->node.bytes != attach.node)
        return fail(Errc::kDenied, "the token is another node's");
    if ((claims->roles & role_bit(role)) == 0)
        return fail(Errc::kDenied, "the token does not allow this role");
    if (nonce != nullptr) {
        if (Status ok = check_signature(attach, role, *nonce); !ok)
            return tl::unexpected(ok.error());
    }
    return claims;
}

}  // namespace kvasir::access
