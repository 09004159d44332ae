#include "net/transport.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "net/socket_wait.hpp"
#include "net/tls_error.hpp"

namespace kvasir::net {
namespace {

constexpr size_t kRecordBytes = 16 << 10;  // the most that a TLS record carries
// Encrypted, then sent while the next one is encrypted and the peer decrypts: larger saves a few
// system calls, smaller overlaps more (measured at 16 to 128 KiB: within 10 % from 64 on).
constexpr size_t kBatchBytes = 4 * kRecordBytes;
constexpr size_t kBatchWireBytes = kBatchBytes + 8 * 64;  // with the records' headers and tags

constexpr uint64_t kRecordEffort = 512;  // about what one record costs, in bytes decrypted
// After the handshake a peer has little to say beside its data: new keys, now and then. Each costs
// several key derivations, and may ask for an answer.
constexpr uint64_t kHandshakeEffort = 4096;
constexpr uint32_t kHandshakesMax = 16;         // in a row, without data between them
constexpr size_t kAnswersBytesMax = 256 << 10;  // that wait because the peer does not read

// What the BIO works on.
struct Wire {
    int fd = -1;
    uint64_t in_left = UINT64_MAX;  // then this read is over
    uint64_t in_bytes = 0;          // from the kernel, of this read
    bool is_established = false;    // the first handshake is over
    uint32_t handshakes = 0;        // messages of this read, since then
    uint32_t handshakes_in_row = 0;
    bool flooded = false;
    bool may_wait = false;  // the next recv() may; then no other
    bool drained = false;   // the kernel had no more: do not ask again
    bool end = false;
    int error = 0;
    std::vector<uint8_t> out;  // encrypted, [out_begin, size) not yet sent
    size_t out_begin = 0;
    uint64_t lost_bytes = 0;  // were in `out` when the connection broke
};

// Batches are built in one buffer per thread, and only what the kernel does not take moves to the
// connection: thousands of idle connections hold none.
std::vector<uint8_t>& scratch() {
    thread_local std::vector<uint8_t> buffer;
    return buffer;
}

int bio_read(BIO* bio, char* data, int size) {
    auto* wire = static_cast<Wire*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    if (wire->out.size() > kAnswersBytesMax) wire->flooded = true;
    if (wire->flooded) return -1;
    if (!wire->drained && wire->in_left != 0) {
        const bool wait = std::exchange(wire->may_wait, false);
        const size_t room = std::min(static_cast<uint64_t>(size), wire->in_left);
        const ssize_t got = ::recv(wire->fd, data, room, wait ? 0 : MSG_DONTWAIT);
        if (got > 0) {
            const auto count = static_cast<size_t>(got);
            wire->drained = count < room;
            wire->in_left -= count;
            wire->in_bytes += count;
            return static_cast<int>(got);
        }
        if (got == 0) {
            wire->end = true;
            return 0;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            wire->error = errno;
            return -1;
        }
        wire->drained = errno != EINTR;
    }
    BIO_set_retry_read(bio);
    return -1;
}

// Called for every message of TLS itself.
void on_tls_message(int is_ours, int, int content_type, const void*, size_t, SSL*, void* arg) {
    auto* wire = static_cast<Wire*>(arg);
    if (is_ours != 0 || content_type != SSL3_RT_HANDSHAKE || !wire->is_established) return;
    ++wire->handshakes;
    if (++wire->handshakes_in_row > kHandshakesMax) wire->flooded = true;
}

int bio_write(BIO* bio, const char* data, int size) {
    auto* wire = static_cast<Wire*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    const auto* bytes = reinterpret_cast<const uint8_t*>(data);
    wire->out.insert(wire->out.end(), bytes, bytes + size);
    return size;
}

long bio_control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_FLUSH) return 1;
    if (command == BIO_CTRL_EOF) return static_cast<Wire*>(BIO_get_data(bio))->end ? 1 : 0;
    return 0;
}

BIO_METHOD* bio_method() {
    static BIO_METHOD* const method = [] {
        BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvasir");
        KVASIR_CHECK(made != nullptr);
        BIO_meth_set_read(made, bio_read);
        BIO_meth_set_write(made, bio_write);
        BIO_meth_set_ctrl(made, bio_control);
        return made;
    }();
    return method;
}

struct SslFree {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
};

// Sends what the BIO gathered, as far as the kernel takes it. 0 or an errno.
int push(Wire& wire) {
    while (wire.out_begin < wire.out.size()) {
        const ssize_t sent = ::send(wire.fd, wire.out.data() + wire.out_begin,
                                    wire.out.size() - wire.out_begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            wire.out_begin += static_cast<size_t>(sent);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return 0;
        } else if (errno != EINTR) {
            const int error = errno;
            wire.lost_bytes += wire.out.size() - wire.out_begin;
            wire.out.clear();
            wire.out_begin = 0;
            return error;
        }
    }
    wire.out.clear();
    wire.out_begin = 0;
    return 0;
}

// Lends the thread's buffer to the BIO for one operation.
class Borrowed {
public:
    explicit Borrowed(Wire& wire) : wire_(wire) {
        if (wire_.out.empty()) wire_.out.swap(scratch());
    }
    ~Borrowed() {
        std::vector<uint8_t> rest(wire_.out.begin() + static_cast<ptrdiff_t>(wire_.out_begin),
                                  wire_.out.end());
        wire_.out.clear();
        if (scratch().capacity() < wire_.out.capacity()) scratch().swap(wire_.out);
        wire_.out = std::move(rest);
        wire_.out_begin = 0;
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;

private:
    Wire& wire_;
};

bool is_ip_address(const std::string& host) {
    ASN1_OCTET_STRING* address = a2i_IPADDRESS(host.c_str());
    const bool is = address != nullptr;
    ASN1_OCTET_STRING_free(address);
    ERR_clear_error();
    return is;
}

bool expect_server(SSL* ssl, const std::string& name) {
    X509_VERIFY_PARAM* parameters = SSL_get0_param(ssl);
    if (is_ip_address(name)) return X509_VERIFY_PARAM_set1_ip_asc(parameters, name.c_str()) == 1;
    X509_VERIFY_PARAM_set_hostflags(parameters, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    return SSL_set1_host(ssl, name.c_str()) == 1 &&
           SSL_set_tlsext_host_name(ssl, name.c_str()) == 1;
}

}  // namespace

struct Transport::Tls {
    Wire wire;
    std::unique_ptr<SSL, SslFree> ssl;
    bool failed = false;               // OpenSSL forbids any further call
    std::optional<Error> read_failed;  // told by the next read()
};

Transport::Transport(UniqueFd fd) : fd_(std::move(fd)) {}
Transport::Transport(Transport&&) noexcept = default;
Transport& Transport::operator=(Transport&&) noexcept = default;
Transport::~Transport() = default;

Result<Transport> Transport::make_tls(UniqueFd fd, ssl_ctx_st* context, Side side,
                                      const std::string& server_name) {
    ERR_clear_error();
    Transport transport(std::move(fd));
    transport.tls_ = std::make_unique<Tls>();
    Tls& tls = *transport.tls_;
    tls.wire.fd = transport.fd();
    tls.ssl.reset(SSL_new(context));
    BIO* bio = tls.ssl ? BIO_new(bio_method()) : nullptr;
    if (bio == nullptr) {
        return fail(Errc::kEnvironment, "no TLS session: " + openssl_error_text());
    }
    BIO_set_data(bio, &tls.wire);
    BIO_set_init(bio, 1);
    SSL_set_bio(tls.ssl.get(), bio, bio);
    SSL_set_msg_callback(tls.ssl.get(), on_tls_message);
    SSL_set_msg_callback_arg(tls.ssl.get(), &tls.wire);
    if (side == Side::kServer) {
        SSL_set_accept_state(tls.ssl.get());
    } else {
        SSL_set_connect_state(tls.ssl.get());
        if (!server_name.empty() && !expect_server(tls.ssl.get(), server_name)) {
            return fail(Errc::kUsage, "\"" + printable(server_name) +
                                          "\" is no name that a certificate can have");
        }
    }
    return transport;
}

Error Transport::tls_error(const char* what, int result) {
    const int kind = SSL_get_error(tls_->ssl.get(), result);
    tls_->failed = true;
    if (tls_->wire.flooded) {
        ERR_clear_error();
        return {Errc::kProtocol, std::string(what) + ": TLS: more than " +
                                     std::to_string(kHandshakesMax) +
                                     " handshake messages without data, or their answers unread"};
    }
    if (tls_->wire.error != 0) {
        ERR_clear_error();
        return socket_error(what, tls_->wire.error);
    }
    if (kind == SSL_ERROR_ZERO_RETURN || tls_->wire.end) {
        ERR_clear_error();
        return {Errc::kClosed, std::string(what) + ": closed by the other side"};
    }
    return openssl_peer_error(what, tls_->ssl.get());
}

Result<bool> Transport::handshake() {
    if (!tls_) return true;
    if (auto status = flush(); !status) return tl::unexpected(std::move(status.error()));
    ERR_clear_error();
    Wire& wire = tls_->wire;
    wire.may_wait = wire.drained = false;
    const int result = SSL_do_handshake(tls_->ssl.get());
    if (result == 1) {
        wire.is_established = true;
        if (auto status = flush(); !status) return tl::unexpected(std::move(status.error()));
        return true;
    }
    if (SSL_get_error(tls_->ssl.get(), result) != SSL_ERROR_WANT_READ) {
        const Error error = tls_error("TLS handshake", result);
        (void)push(wire);  // the alert that says why
        return tl::unexpected(error);
    }
    if (auto status = flush(); !status) return tl::unexpected(std::move(status.error()));
    return false;
}

bool Transport::is_peer_unknown() const {
    return tls_ && is_issuer_unknown(SSL_get_verify_result(tls_->ssl.get()));
}

// ---- reading ----

Result<Transport::Got> Transport::read(std::span<uint8_t> room, bool may_wait) {
    if (tls_) return read_tls(room, may_wait);
    const ssize_t got = ::recv(fd_.get(), room.data(), room.size(), may_wait ? 0 : MSG_DONTWAIT);
    if (got > 0) {
        const auto count = static_cast<size_t>(got);
        return Got{count, count, count < room.size(), false};
    }
    if (got == 0) return Got{0, 0, true, true};
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        return Got{0, 0, errno != EINTR, false};
    }
    return tl::unexpected(socket_error("recv", errno));
}

// A call of SSL_read gives one record. The kernel is asked until it gave less than there was room
// for; what arrives after that makes the socket readable again. What is left over when the effort
// is spent is in the kernel, too, or of a record that has not fully arrived, or there was data:
// OpenSSL asks for bytes only when it has no whole record.
Result<Transport::Got> Transport::read_tls(std::span<uint8_t> room, bool may_wait) {
    if (tls_->read_failed) return tl::unexpected(*tls_->read_failed);
    if (tls_->failed) return fail(Errc::kClosed, "recv: the TLS session has ended");
    ERR_clear_error();
    Wire& wire = tls_->wire;
    wire.may_wait = may_wait;
    wire.drained = false;
    wire.in_left = std::max(room.size(), kRecordBytes) * 9 / 8 + 2048;
    wire.in_bytes = 0;
    wire.handshakes = 0;
    SSL* ssl = tls_->ssl.get();
    Got got;
    int result = 1;
    uint64_t records = 0;
    const auto beside_bytes = [&] {
        return records * kRecordEffort + wire.handshakes * kHandshakeEffort;
    };
    const uint64_t effort_max = room.size() * 9 / 8 + kRecordEffort;
    while (got.bytes < room.size() && got.bytes + beside_bytes() < effort_max) {
        size_t count = 0;
        result = SSL_read_ex(ssl, room.data() + got.bytes, room.size() - got.bytes, &count);
        if (result != 1) break;
        wire.may_wait = false;
        got.bytes += count;
        wire.handshakes_in_row = 0;
        ++records;
    }
    got.effort = std::max<uint64_t>(wire.in_bytes, got.bytes) + beside_bytes();
    if (result == 1) return got;  // full, or enough: there may be more
    const int kind = SSL_get_error(ssl, result);
    if (kind == SSL_ERROR_WANT_READ) {
        got.drained = wire.drained;
    } else if (got.bytes != 0 && kind == SSL_ERROR_ZERO_RETURN) {
        // the end is told by the next call
    } else if (kind == SSL_ERROR_ZERO_RETURN) {
        got.drained = got.end = true;
    } else if (got.bytes != 0) {
        tls_->read_failed = tls_error("recv", result);  // what arrived before it counts first
    } else {
        const Error error = tls_error("recv", result);
        (void)push(wire);  // the alert that says why
        return tl::unexpected(error);
    }
    if (!wire.out.empty()) (void)push(wire);  // a failure shows when something is written
    return got;
}

void Transport::take_buffered(std::vector<uint8_t>& out) {
    if (!tls_ || tls_->failed) return;
    ERR_clear_error();
    tls_->wire.drained = true;  // nothing new from the kernel
    std::array<uint8_t, 4096> piece;
    size_t count = 0;
    while (SSL_has_pending(tls_->ssl.get()) == 1 &&
           SSL_read_ex(tls_->ssl.get(), piece.data(), piece.size(), &count) == 1) {
        out.insert(out.end(), piece.begin(), piece.begin() + static_cast<ptrdiff_t>(count));
    }
    ERR_clear_error();
}

// ---- writing ----

Result<uint64_t> Transport::write(std::span<const iovec> vectors) {
    if (tls_) return write_tls(vectors);
    msghdr message = {};
    message.msg_iov = const_cast<iovec*>(vectors.data());
    message.msg_iovlen = vectors.size();
    while (true) {
        const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) return static_cast<uint64_t>(sent);
        if (errno == EAGAIN || errno == EWOULDBLOCK) return uint64_t{0};
        if (errno != EINTR) return tl::unexpected(socket_error("send", errno));
    }
}

namespace {

// Hands out the bytes of vectors as records: from where they lie if they fill one, else gathered.
class RecordCutter {
public:
    explicit RecordCutter(std::span<const iovec> vectors) : vectors_(vectors) { skip_empty(); }

    bool empty() const { return vectors_.empty(); }

    std::span<const uint8_t> next(size_t bytes_max) {
        const size_t here = vectors_.front().iov_len - offset_;
        if (here >= kRecordBytes || vectors_.size() == 1) {
            size_t count = std::min(here, bytes_max);
            if (count > kRecordBytes) count -= count % kRecordBytes;
            return take(count);
        }
        size_t gathered = 0;
        while (gathered < kRecordBytes && !empty()) {
            const auto piece =
                take(std::min(vectors_.front().iov_len - offset_, kRecordBytes - gathered));
            std::memcpy(staging_.data() + gathered, piece.data(), piece.size());
            gathered += piece.size();
        }
        return {staging_.data(), gathered};
    }

private:
    std::span<const uint8_t> take(size_t count) {
        const auto* data = static_cast<const uint8_t*>(vectors_.front().iov_base) + offset_;
        offset_ += count;
        skip_empty();
        return {data, count};
    }
    void skip_empty() {
        while (!vectors_.empty() && vectors_.front().iov_len == offset_) {
            vectors_ = vectors_.subspan(1);
            offset_ = 0;
        }
    }

    std::span<const iovec> vectors_;
    size_t offset_ = 0;  // in the first one
    std::array<uint8_t, kRecordBytes> staging_;
};

}  // namespace

Result<uint64_t> Transport::write_tls(std::span<const iovec> vectors) {
    if (auto status = flush(); !status) return tl::unexpected(std::move(status.error()));
    if (wants_write()) return uint64_t{0};
    ERR_clear_error();
    Wire& wire = tls_->wire;
    const Borrowed borrowed(wire);
    wire.out.reserve(kBatchWireBytes);
    RecordCutter cutter(vectors);
    uint64_t taken = 0;
    while (!cutter.empty() && taken < kBatchBytes) {
        const auto piece = cutter.next(kBatchBytes - taken);
        size_t written = 0;
        const int result = SSL_write_ex(tls_->ssl.get(), piece.data(), piece.size(), &written);
        if (result != 1 || written != piece.size()) {
            return tl::unexpected(tls_error("send", result));
        }
        taken += written;
    }
    const uint64_t lost_before = wire.lost_bytes;
    if (const int error = push(wire); error != 0) {
        wire.lost_bytes = lost_before;  // of these nobody was told that they are taken
        return tl::unexpected(socket_error("send", error));
    }
    return taken;
}

uint64_t Transport::unsent_bytes() const {
    return tls_ ? tls_->wire.out.size() - tls_->wire.out_begin : 0;
}

uint64_t Transport::lost_bytes() const {
    return tls_ ? tls_->wire.lost_bytes : 0;
}

Status Transport::flush() {
    if (!tls_) return {};
    if (const int error = push(tls_->wire); error != 0) {
        return tl::unexpected(socket_error("send", error));
    }
    if (unsent_bytes() == 0 && tls_->wire.out.capacity() != 0) tls_->wire.out = {};
    return {};
}

bool Transport::request_key_update() {
    return tls_ && SSL_key_update(tls_->ssl.get(), SSL_KEY_UPDATE_REQUESTED) == 1;
}

void Transport::shut_down_write() {
    if (tls_ && !tls_->failed) {
        ERR_clear_error();
        if (SSL_is_init_finished(tls_->ssl.get())) (void)SSL_shutdown(tls_->ssl.get());
        (void)push(tls_->wire);
        ERR_clear_error();
    }
    ::shutdown(fd_.get(), SHUT_WR);
}

}  // namespace kvasir::net
