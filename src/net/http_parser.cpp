#include "net/http_parser.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/serializer.hpp>

#include "base/log.hpp"

namespace kvasir::net {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

std::string_view view(boost::beast::string_view text) {
    return {text.data(), text.size()};
}

boost::beast::string_view beast_view(std::string_view text) {
    return {text.data(), text.size()};
}

// One step of a parser. Needing more bytes is no error.
template <class Parser>
Result<size_t> put(Parser& parser, std::span<const uint8_t> bytes, error_code& ec) {
    ec = {};
    const size_t used = parser.put(asio::const_buffer(bytes.data(), bytes.size()), ec);
    if (ec == http::error::need_more) ec = {};
    if (!ec) return used;
    const bool limit = ec == http::error::header_limit || ec == http::error::body_limit;
    return fail(limit ? Errc::kLimit : Errc::kProtocol, "HTTP: " + ec.message());
}

template <class Fields>
bool list_has(const Fields& fields, std::string_view name, std::string_view token) {
    for (auto [entry, end] = fields.equal_range(beast_view(name)); entry != end; ++entry) {
        if (http::token_list(entry->value()).exists(beast_view(token))) return true;
    }
    return false;
}

bool clean(std::string_view text) {
    return std::none_of(text.begin(), text.end(),
                        [](char c) { return (c >= 0 && c < ' ' && c != '\t') || c == 0x7f; });
}

template <class Message>
void set_headers(Message& message, const HeaderPairs& headers) {
    for (const auto& [name, value] : headers) {
        if (!name.empty() && clean(name) && clean(value)) {
            message.insert(beast_view(name), beast_view(value));
        } else {
            log(LogLevel::kError, "net", "HTTP header left out: " + printable(name));
        }
    }
}

template <bool IsRequest>
std::string serialize(http::message<IsRequest, http::empty_body>& message) {
    std::string out;
    http::serializer<IsRequest, http::empty_body> serializer(message);
    const auto append = [&out, &serializer](error_code&, const auto& buffers) {
        size_t size = 0;
        for (auto it = asio::buffer_sequence_begin(buffers);
             it != asio::buffer_sequence_end(buffers); ++it) {
            const asio::const_buffer buffer(*it);
            out.append(static_cast<const char*>(buffer.data()), buffer.size());
            size += buffer.size();
        }
        serializer.consume(size);
    };
    error_code ec;
    while (!serializer.is_done() && !ec) serializer.next(ec, append);
    return out;
}

}  // namespace

// ---- requests ----

namespace {

// A string that grows with what has come; Beast's own takes the memory for a length that is only
// said.
struct GrowingBody {
    using value_type = std::string;
    static uint64_t size(const value_type& body) { return body.size(); }

    class reader {
    public:
        template <bool IsRequest, class Fields>
        reader(http::header<IsRequest, Fields>&, value_type& body) : body_(body) {}
        void init(const boost::optional<uint64_t>&, error_code& ec) { ec = {}; }
        template <class Buffers>
        size_t put(const Buffers& buffers, error_code& ec) {
            const size_t before = body_.size();
            for (const asio::const_buffer part : boost::beast::buffers_range_ref(buffers)) {
                body_.append(static_cast<const char*>(part.data()), part.size());
            }
            ec = {};
            return body_.size() - before;
        }
        void finish(error_code& ec) { ec = {}; }

    private:
        value_type& body_;
    };
};

}  // namespace

struct RequestParser::Impl {
    http::request_parser<GrowingBody> parser;
    int refusal_status = 0;
};

RequestParser::RequestParser(uint32_t header_bytes_max, uint64_t body_bytes_max)
    : impl_(std::make_unique<Impl>()) {
    impl_->parser.header_limit(header_bytes_max);
    impl_->parser.body_limit(body_bytes_max);
}
RequestParser::RequestParser(RequestParser&&) noexcept = default;
RequestParser& RequestParser::operator=(RequestParser&&) noexcept = default;
RequestParser::~RequestParser() = default;

Result<size_t> RequestParser::feed(std::span<const uint8_t> bytes) {
    size_t used = 0;
    while (!done() && used < bytes.size()) {
        const bool had_head = head_done();
        error_code ec;
        auto step = put(impl_->parser, bytes.subspan(used), ec);
        if (ec == http::error::header_limit) {
            impl_->refusal_status = 431;
        } else if (ec == http::error::body_limit) {
            impl_->refusal_status = 413;
        } else if (ec && ec != http::error::bad_method && ec != http::error::bad_target &&
                   ec != http::error::bad_version) {
            impl_->refusal_status = 400;  // the first line was one of HTTP
        }
        if (!step) return step;
        used += *step;
        if (*step == 0 || (!had_head && head_done())) break;
    }
    return used;
}

int RequestParser::refusal_status() const {
    return impl_->refusal_status;
}
uint64_t RequestParser::body_bytes() const {
    return impl_->parser.get().body().size();
}
bool RequestParser::head_done() const {
    return impl_->parser.is_header_done();
}
bool RequestParser::done() const {
    return impl_->parser.is_done();
}
std::string_view RequestParser::method() const {
    return view(impl_->parser.get().method_string());
}
std::string_view RequestParser::target() const {
    return view(impl_->parser.get().target());
}
bool RequestParser::http_1_1() const {
    return impl_->parser.get().version() == 11;
}
bool RequestParser::keep_alive() const {
    return impl_->parser.get().keep_alive();
}
bool RequestParser::has_body() const {
    const auto& message = impl_->parser.get();
    return message.count(http::field::content_length) != 0 ||
           message.count(http::field::transfer_encoding) != 0;
}
std::string_view RequestParser::header(std::string_view name) const {
    return view(impl_->parser.get()[beast_view(name)]);
}
bool RequestParser::has_token(std::string_view name, std::string_view token) const {
    return list_has(impl_->parser.get(), name, token);
}

std::map<std::string, std::string> RequestParser::headers() const {
    std::map<std::string, std::string> all;
    for (const auto& field : impl_->parser.get()) {
        std::string name(view(field.name_string()));
        for (char& c : name) {
            if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
        }
        all.emplace(std::move(name), view(field.value()));
    }
    return all;
}

std::string RequestParser::take_body() {
    return std::move(impl_->parser.get().body());
}

// ---- responses ----

struct ResponseParser::Impl {
    http::response_parser<http::empty_body> parser;
};

ResponseParser::ResponseParser(uint32_t header_bytes_max) : impl_(std::make_unique<Impl>()) {
    impl_->parser.header_limit(header_bytes_max);
}
ResponseParser::ResponseParser(ResponseParser&&) noexcept = default;
ResponseParser& ResponseParser::operator=(ResponseParser&&) noexcept = default;
ResponseParser::~ResponseParser() = default;

Result<size_t> ResponseParser::feed(std::span<const uint8_t> bytes) {
    error_code ec;
    auto used = put(impl_->parser, bytes, ec);
    if (!used) used.error().code = Errc::kProtocol;
    return used;
}
bool ResponseParser::head_done() const {
    return impl_->parser.is_header_done();
}
int ResponseParser::status() const {
    return static_cast<int>(impl_->parser.get().result_int());
}
std::string_view ResponseParser::reason() const {
    return view(impl_->parser.get().reason());
}
std::string_view ResponseParser::header(std::string_view name) const {
    return view(impl_->parser.get()[beast_view(name)]);
}
bool ResponseParser::has_token(std::string_view name, std::string_view token) const {
    return list_has(impl_->parser.get(), name, token);
}

// ---- writing ----

std::string format_head(const ResponseHead& head) {
    http::response<http::empty_body> message(
        static_cast<http::status>(static_cast<unsigned>(head.status)), 11);
    message.set(http::field::server, "kvasir/" KVASIR_VERSION);
    set_headers(message, head.headers);
    if (head.content_length) {
        message.set(http::field::content_length, std::to_string(*head.content_length));
    }
    if (head.status != 101) message.keep_alive(head.keep_alive);
    return serialize(message);
}

std::string format_get(std::string_view target, const HeaderPairs& headers) {
    http::request<http::empty_body> message(http::verb::get, beast_view(target), 11);
    set_headers(message, headers);
    return serialize(message);
}

}  // namespace kvasir::net
