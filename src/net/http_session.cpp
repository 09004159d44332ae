// Connection's HTTP: requests in, the handler's answers out.
#include <utility>  // before Asio's awaitable header

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <string>
#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.hpp"
#include "net/connection.hpp"
#include "net/http_text.hpp"

namespace kvasir::net {
namespace {

namespace asio = boost::asio;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr uint64_t kFilePieceBytes = 256 << 10;
constexpr size_t kUntoldMax = 256;
constexpr std::chrono::milliseconds kTakenPauseFirst{2};
constexpr std::chrono::milliseconds kTakenPauseMax{500};
constexpr uint64_t kTlsPieceBytes = 64 << 10;  // held in memory while it is sent

HttpResponse internal_error() {
    HttpResponse response = error_response({Errc::kEnvironment, "the request was not answered"});
    response.status = 500;
    return response;
}

// Set by us, whatever a handler says.
bool is_ours(std::string_view name) {
    std::string lower(name);
    for (char& c : lower) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return lower == "content-length" || lower == "transfer-encoding";
}

bool has_no_body(int status) {
    return status == 204 || status == 304 || (status >= 100 && status < 200);
}

// Answers 500 when the handler lets go of it without a word.
struct Asked {
    std::shared_ptr<ReplySlot> slot;
    explicit Asked(std::shared_ptr<ReplySlot> slot_in) : slot(std::move(slot_in)) {}
    ~Asked() { slot->put(internal_error()); }
    Asked(const Asked&) = delete;
    Asked& operator=(const Asked&) = delete;
};

}  // namespace

// ---- ReplySlot ----

void ReplySlot::put(HttpResponse response) {
    {
        const std::lock_guard lock(mu_);
        if (std::exchange(answered_, true)) return;
        if (!abandoned_) {
            response_ = std::move(response);
            home_->post([connection = connection_] {
                if (const auto alive = connection.lock()) alive->wake();
            });
            return;
        }
    }
    if (!response.on_sent) return;
    home_->post([on_sent = std::move(response.on_sent)] { on_sent(0); });
}

std::optional<HttpResponse> ReplySlot::take() {
    const std::lock_guard lock(mu_);
    return std::exchange(response_, std::nullopt);
}

void ReplySlot::abandon() {
    std::optional<HttpResponse> unsent;
    {
        const std::lock_guard lock(mu_);
        abandoned_ = true;
        unsent = std::exchange(response_, std::nullopt);
    }
    if (unsent && unsent->on_sent) unsent->on_sent(0);
}

// ---- requests ----

asio::awaitable<bool> Connection::read_head(bool first) {
    const HttpLimits& limits = owner_.options().http_limits;
    const uint32_t header_bytes_max = owner_.options().http
                                          ? limits.header_bytes_max
                                          : owner_.options().handshake.header_bytes_max;
    parser_.emplace(header_bytes_max, limits.body_bytes_max);
    if (input_.empty()) {
        if (!first) {
            idle_since_ = Clock::now();
            set_deadline(idle_since_ + limits.idle_max);
            is_idle_ = true;
            owner_.begin_idle(*this);
        }
        const bool filled = co_await fill();
        if (std::exchange(is_idle_, false)) owner_.end_idle(*this);
        if (!filled) co_return false;
    }
    request_start_ = Clock::now();
    if (!first) set_deadline(request_start_ + limits.request_deadline);
    co_return co_await feed(&RequestParser::head_done);
}

asio::awaitable<bool> Connection::read_body() {
    if (parser_->done()) co_return true;
    if (parser_->http_1_1() && parser_->has_token("Expect", "100-continue")) {
        uint64_t ignored = 0;
        const Deadline deadline = request_start_ + owner_.options().http_limits.request_deadline;
        if (!co_await send_bytes("HTTP/1.1 100 Continue\r\n\r\n", {}, ignored)) co_return false;
        set_deadline(deadline);
    }
    co_return co_await feed(&RequestParser::done);
}

// Input goes to the parser until it says that; what it cannot take is answered.
asio::awaitable<bool> Connection::feed(bool (RequestParser::*until)() const) {
    while (true) {
        const auto used = parser_->feed(input_);
        if (!used) {
            co_await refuse_broken();
            co_return false;
        }
        input_.erase(input_.begin(), input_.begin() + static_cast<ptrdiff_t>(*used));
        if (!take_body_room()) {
            response_ = error_response({Errc::kBusy, "too many requests; try again in a moment"});
            co_await refuse();
            co_return false;
        }
        if (((*parser_).*until)()) co_return true;
        // Of what is neither head nor body (extensions of chunks, trailers) the parser keeps
        // nothing and bounds nothing: it asks for more until a line is whole.
        if (parser_->head_done() && input_.size() > owner_.options().http_limits.header_bytes_max) {
            co_await refuse_broken();
            co_return false;
        }
        // The others' turn, and the deadline's: a client that sends as fast as we parse would never
        // let them have it.
        co_await asio::post(co_await asio::this_coro::executor, asio::use_awaitable);
        if (!co_await fill()) co_return false;
    }
}

Result<HttpRequest> Connection::make_request() {
    auto target = parse_target(parser_->target());
    if (!target) return tl::unexpected(std::move(target.error()));
    HttpRequest request;
    request.method = parser_->method();
    request.path = std::move(target->path);
    request.query = std::move(target->query);
    request.headers = parser_->headers();
    request.body = parser_->take_body();
    request.peer_address = address_;
    request.tls = transport_.tls();
    return request;
}

asio::awaitable<bool> Connection::handle() {
    const bool keep_alive = parser_->keep_alive();
    auto request = make_request();
    set_deadline(Deadline::max());  // however long the handler takes
    if (request) {
        const auto slot = ask_handler(std::move(*request));
        if (!co_await take_reply(slot)) co_return false;
    } else {
        response_ = error_response(request.error());
    }
    drop_body();
    const bool sent = co_await send(keep_alive);
    co_return sent&& keep_alive;
}

std::shared_ptr<ReplySlot> Connection::ask_handler(HttpRequest request) {
    auto slot = std::make_shared<ReplySlot>(owner_.home(), weak_from_this());
    const auto asked = std::make_shared<Asked>(slot);
    try {
        owner_.options().http(std::move(request), [asked](HttpResponse answer) {
            asked->slot->put(std::move(answer));
        });
    } catch (const std::exception& exception) {
        log(LogLevel::kError, "net", "an HTTP handler threw: " + printable(exception.what()));
        slot->put(internal_error());
    }
    return slot;
}

asio::awaitable<bool> Connection::take_reply(std::shared_ptr<ReplySlot> slot) {
    while (!stopped_) {
        if (auto response = slot->take()) {
            response_ = std::move(*response);
            co_return true;
        }
        reply_timer_.expires_at(Deadline::max());
        co_await reply_timer_.async_wait(kAwait);
    }
    slot->abandon();
    co_return false;
}

// ---- answers ----

std::string Connection::response_head(bool keep_alive, bool bodiless) const {
    ResponseHead head;
    head.status = response_.status;
    head.keep_alive = keep_alive;
    head.headers.emplace_back("Content-Type", response_.content_type);
    for (const auto& header : response_.headers) {
        if (!is_ours(header.first)) head.headers.push_back(header);
    }
    if (!bodiless) {
        head.content_length = response_.file ? response_.file->bytes : response_.body.size();
    }
    return format_head(head);
}

asio::awaitable<bool> Connection::send(bool keep_alive) {
    const bool bodiless = has_no_body(response_.status);
    const bool with_body = !bodiless && parser_->method() != "HEAD";
    const std::string head = response_head(keep_alive, bodiless);
    const std::string_view body =
        with_body && !response_.file ? std::string_view(response_.body) : std::string_view();
    uint64_t sent = 0;
    bool whole = co_await send_bytes(head, body, sent);
    sent = sent > head.size() ? sent - head.size() : 0;
    if (whole && with_body && response_.file) {
        if (transport_.tls()) {
            whole = co_await send_tls_file(sent);
        } else {
            whole = co_await send_file(sent);
        }
    }
    if (!whole) log(LogLevel::kDebug, "net", peer() + ": an answer was cut short");
    const HttpResponse finished = std::exchange(response_, HttpResponse());
    if (finished.on_sent) tell_when_taken(finished.on_sent, sent);
    co_return whole;
}

// ---- what was taken ----

void Connection::tell_when_taken(std::function<void(uint64_t)> on_sent, uint64_t body_bytes) {
    if (untold_.size() >= kUntoldMax) {  // a client that asks on and on and acknowledges nothing
        const Untold oldest = std::move(untold_.front());
        untold_.pop_front();
        oldest.on_sent(oldest.body_bytes);
    }
    untold_.push_back({std::move(on_sent), body_bytes, bytes_handed_});
    tell_taken();
    if (!untold_.empty()) tell_taken_later(kTakenPauseFirst);
}

// Bytes on their way, as the kernel and TLS have them; nothing when the socket does not say.
std::optional<uint64_t> Connection::bytes_waiting() const {
    int in_kernel = 0;
    if (::ioctl(transport_.fd(), SIOCOUTQ, &in_kernel) != 0) return std::nullopt;
    return static_cast<uint64_t>(in_kernel) + transport_.unsent_bytes() + transport_.lost_bytes();
}

// Of bytes_handed_: what the other end's system has acknowledged. TLS's framing of what is under
// way counts as waiting, so meanwhile this is too low by it, never too high.
uint64_t Connection::bytes_taken() const {
    const auto waiting = bytes_waiting();
    if (!waiting) return 0;
    const uint64_t ours = *waiting - std::min(*waiting, end_bytes_);  // the end is the last of it
    return bytes_handed_ - std::min(bytes_handed_, ours);
}

void Connection::tell_taken() {
    const uint64_t taken = untold_.empty() ? 0 : bytes_taken();
    while (!untold_.empty() && untold_.front().end <= taken) {
        const Untold done = std::move(untold_.front());
        untold_.pop_front();
        done.on_sent(done.body_bytes);
    }
}

// The kernel does not say when an acknowledgement comes: we ask, more and more rarely.
void Connection::tell_taken_later(std::chrono::milliseconds pause) {
    taken_timer_.expires_after(pause);
    taken_timer_.async_wait([weak = weak_from_this(), pause](boost::system::error_code ec) {
        const auto self = ec ? nullptr : weak.lock();
        if (!self) return;
        self->tell_taken();
        if (!self->untold_.empty()) self->tell_taken_later(std::min(2 * pause, kTakenPauseMax));
    });
}

// The connection ends: what is still under way may never arrive.
void Connection::tell_rest() {
    taken_timer_.cancel();
    const uint64_t taken = untold_.empty() ? 0 : bytes_taken();
    const auto all = std::exchange(untold_, {});
    for (const Untold& left : all) {
        const uint64_t missing = left.end - std::min(left.end, taken);
        left.on_sent(left.body_bytes - std::min(left.body_bytes, missing));
    }
}

void Connection::end_writing() {
    const auto before = bytes_waiting();
    transport_.shut_down_write();
    const auto after = bytes_waiting();
    if (before && after && *after > *before) end_bytes_ = *after - *before;
}

asio::awaitable<bool> Connection::send_bytes(std::string_view head, std::string_view body,
                                             uint64_t& sent) {
    const auto stall_max = owner_.options().http_limits.write_stall_max;
    const uint64_t total = head.size() + body.size();
    uint64_t done = 0;
    if (!in_handshake_) set_deadline(Clock::now() + stall_max);
    while (done < total || transport_.wants_write()) {
        const size_t head_done = std::min<uint64_t>(done, head.size());
        const size_t body_done = done - head_done;
        std::array<iovec, 2> vectors = {
            iovec{const_cast<char*>(head.data()) + head_done, head.size() - head_done},
            iovec{const_cast<char*>(body.data()) + body_done, body.size() - body_done}};
        const uint64_t before = transport_.unsent_bytes();
        const auto count = transport_.write(vectors);
        if (!count) co_return false;
        done += *count;
        sent += *count;
        bytes_handed_ += *count;
        const bool moved = *count != 0 || transport_.unsent_bytes() < before;
        if (moved && !in_handshake_) set_deadline(Clock::now() + stall_max);
        if (*count != 0) continue;
        if (!co_await wait(true)) co_return false;
    }
    co_return true;
}

asio::awaitable<bool> Connection::send_file(uint64_t& sent) {
    const FileBody& file = *response_.file;
    const auto stall_max = owner_.options().http_limits.write_stall_max;
    auto offset = static_cast<off_t>(file.offset);
    uint64_t left = file.bytes;
    set_deadline(Clock::now() + stall_max);
    while (left != 0) {
        // Raises SIGPIPE, which the listener's thread blocks.
        const ssize_t count = ::sendfile(transport_.fd(), *file.fd, &offset,
                                         static_cast<size_t>(std::min(left, kFilePieceBytes)));
        if (count > 0) {
            left -= static_cast<uint64_t>(count);
            sent += static_cast<uint64_t>(count);
            bytes_handed_ += static_cast<uint64_t>(count);
            set_deadline(Clock::now() + stall_max);
            co_await asio::post(co_await asio::this_coro::executor, asio::use_awaitable);
            if (stopped_) co_return false;
        } else if (count == 0) {
            log(LogLevel::kError, "net", "a file became shorter while it was sent");
            co_return false;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!co_await wait(true)) co_return false;
        } else if (errno != EINTR) {
            co_return false;
        }
    }
    co_return true;
}

asio::awaitable<bool> Connection::send_tls_file(uint64_t& sent) {
    const FileBody& file = *response_.file;
    std::vector<char> piece(static_cast<size_t>(std::min(file.bytes, kTlsPieceBytes)));
    for (uint64_t done = 0; done < file.bytes;) {
        const size_t wanted = static_cast<size_t>(std::min(file.bytes - done, kTlsPieceBytes));
        const ssize_t got =
            ::pread(*file.fd, piece.data(), wanted, static_cast<off_t>(file.offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            log(LogLevel::kError, "net", "a file could not be read while it was sent");
            co_return false;
        }
        const std::string_view view(piece.data(), static_cast<size_t>(got));
        if (!co_await send_bytes(view, {}, sent)) co_return false;
        done += static_cast<uint64_t>(got);
        co_await asio::post(co_await asio::this_coro::executor, asio::use_awaitable);
        if (stopped_) co_return false;
    }
    co_return true;
}

}  // namespace kvasir::net
