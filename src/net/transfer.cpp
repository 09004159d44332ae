#include "net/transfer.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include <openssl/evp.h>
#include <unistd.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "net/origin.hpp"
#include "net/tls_error.hpp"

namespace kvasir::net {
namespace {

constexpr size_t kHeadBytesMax = 64 << 10;
constexpr long kReceiveBufferBytes = 256 << 10;

void global_init() {
    static std::once_flag once;
    std::call_once(once, [] { KVASIR_CHECK(curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK); });
}

bool token_character(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool is_token(std::string_view text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), token_character);
}

std::string_view trimmed(std::string_view text) {
    const std::string_view blank = " \t\r\n";
    const size_t first = text.find_first_not_of(blank);
    if (first == text.npos) return {};
    return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

std::string lower(std::string_view text) {
    std::string out(text);
    for (char& c : out) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return out;
}

}  // namespace

Result<TransferTrust> TransferTrust::make(const ClientTrust& trust) {
    TransferTrust out;
    out.advice = trust.advice;
    out.pin_advice = trust.pin_advice;
    if (trust.pin) {
        unsigned char text[48] = {};  // 44 characters and a NUL
        EVP_EncodeBlock(text, trust.pin->data(), static_cast<int>(trust.pin->size()));
        out.pin = std::string("sha256//") + reinterpret_cast<const char*>(text);
        if (!trust.pin_url.empty()) {
            auto url = HttpUrl::parse(trust.pin_url);
            if (!url) return tl::unexpected(url.error());
            out.pin_origin = url->origin();
        }
    }
    // Where the pin is for every server, nobody looks at certificates.
    if (!trust.ca_file.empty() && (out.pin.empty() || !out.pin_origin.empty())) {
        if (access(trust.ca_file.c_str(), R_OK) != 0) {
            return fail(Errc::kEnvironment, "cannot read the certificates in " +
                                                printable(trust.ca_file) +
                                                " (a PEM file of trusted roots)");
        }
        out.ca_file = trust.ca_file;
    }
    return out;
}

std::unique_ptr<Transfers> Transfers::make() {
    global_init();
    CURLM* multi = curl_multi_init();
    if (multi == nullptr) return nullptr;
    return std::unique_ptr<Transfers>(new Transfers(multi));
}

Transfers::~Transfers() {
    curl_multi_cleanup(multi_);
}

void Transfers::keep_connections(uint32_t count) {
    curl_multi_setopt(multi_, CURLMOPT_MAXCONNECTS, static_cast<long>(count));
}

Status Transfers::turn() {
    int running = 0;
    const CURLMcode code = curl_multi_perform(multi_, &running);
    if (code != CURLM_OK) {
        return fail(Errc::kEnvironment, std::string("libcurl: ") + curl_multi_strerror(code));
    }
    return {};
}

Transfer* Transfers::ended(CURLcode& result) {
    int left = 0;
    while (CURLMsg* message = curl_multi_info_read(multi_, &left)) {
        if (message->msg != CURLMSG_DONE) continue;
        result = message->data.result;
        Transfer* transfer = nullptr;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
        transfer->stop();
        return transfer;
    }
    return nullptr;
}

void Transfers::wait(std::chrono::milliseconds timeout) {
    curl_multi_poll(multi_, nullptr, 0, static_cast<int>(timeout.count()), nullptr);
}

void Transfers::wake() {
    curl_multi_wakeup(multi_);
}

Transfer::~Transfer() {
    stop();
    if (easy_ != nullptr) curl_easy_cleanup(easy_);
    curl_slist_free_all(header_lines_);
}

Status Transfer::add_header(const std::string& name, const std::string& value) {
    const bool sendable = std::none_of(value.begin(), value.end(), [](unsigned char c) {
        return (c < 0x20 && c != '\t') || c == 0x7f;
    });
    if (!is_token(name) || !sendable) {
        return fail(Errc::kUsage,
                    "header " + printable(name, 60) + ": characters that no header may have");
    }
    // "Name;" is libcurl's way to send a header without a value.
    const std::string line = value.empty() ? name + ";" : name + ": " + value;
    curl_slist* longer = curl_slist_append(header_lines_, line.c_str());
    if (longer == nullptr) return fail(Errc::kEnvironment, "no memory for a header");
    header_lines_ = longer;
    return {};
}

void Transfer::set_trust(const HttpUrl& url) {
    set(CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
    if (trust_.pins(url)) {
        // The pin alone decides. A handshake without a certificate would have nothing to pin.
        set(CURLOPT_PINNEDPUBLICKEY, trust_.pin.c_str());
        set(CURLOPT_SSL_VERIFYPEER, 0L);
        set(CURLOPT_SSL_VERIFYHOST, 0L);
        set(CURLOPT_SSL_CIPHER_LIST, "DEFAULT:!aNULL:!eNULL:!PSK:!SRP");
    } else if (!trust_.ca_file.empty()) {
        set(CURLOPT_CAINFO, trust_.ca_file.c_str());
        set(CURLOPT_CAPATH, static_cast<const char*>(nullptr));  // not the system's as well
    }
}

void Transfer::set_body(const TransferRequest& request) {
    if (request.method == "HEAD") {
        set(CURLOPT_NOBODY, 1L);
    } else if (request.method == "GET" && request.body.empty()) {
        set(CURLOPT_HTTPGET, 1L);
    } else {
        set(CURLOPT_POST, 1L);
        set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
        set(CURLOPT_POSTFIELDS, request.body.empty() ? "" : request.body.data());
        set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
    }
}

Status Transfer::prepare(const TransferRequest& request) {
    if (!is_token(request.method)) {
        return fail(Errc::kUsage, "not an HTTP method: " + printable(request.method, 60));
    }
    if (easy_ == nullptr) easy_ = curl_easy_init();
    if (easy_ == nullptr) return fail(Errc::kEnvironment, "no memory for a transfer");
    curl_easy_reset(easy_);
    set_failed_ = false;
    curl_slist_free_all(std::exchange(header_lines_, nullptr));
    HeaderList headers = {{"Accept-Encoding", "identity"},
                          {"User-Agent", "kvasir/" KVASIR_VERSION}};
    headers.insert(headers.end(), request.headers.begin(), request.headers.end());
    for (const auto& [name, value] : headers) {
        if (auto added = add_header(name, value); !added) return added;
    }
    // No waiting for "100 Continue".
    curl_slist* longer = curl_slist_append(header_lines_, "Expect:");
    if (longer == nullptr) return fail(Errc::kEnvironment, "no memory for a header");
    header_lines_ = longer;
    set_body(request);
    set_trust(*request.url);
    set(CURLOPT_URL, request.url->text().c_str());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    set(CURLOPT_FOLLOWLOCATION, 0L);
    set(CURLOPT_HTTPHEADER, header_lines_);
    set(CURLOPT_HEADEROPT, static_cast<long>(CURLHEADER_SEPARATE));  // none for proxies
    set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    // What is on this machine is no proxy's matter, and secrets go there without TLS.
    if (const auto origin = parse_origin(request.url->text()); origin && origin->is_loopback)
        set(CURLOPT_NOPROXY, "*");
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_QUICK_EXIT, 1L);  // a slow name lookup must not hold up cancel()
    set(CURLOPT_CONNECTTIMEOUT_MS,
        static_cast<long>(std::max<int64_t>(1, request.connect_timeout.count())));
    set(CURLOPT_BUFFERSIZE, kReceiveBufferBytes);
    set(CURLOPT_TCP_KEEPALIVE, 1L);
    set(CURLOPT_ERRORBUFFER, error_text_);
    set(CURLOPT_PRIVATE, this);
    set(CURLOPT_HEADERFUNCTION, &Transfer::header_callback);
    set(CURLOPT_HEADERDATA, this);
    set(CURLOPT_WRITEFUNCTION, &Transfer::body_callback);
    set(CURLOPT_WRITEDATA, this);
    // A pin or root that could not be set must not become a connection without one.
    if (set_failed_) return fail(Errc::kEnvironment, "libcurl refuses a setting (no memory?)");
    return {};
}

Status Transfer::start(const TransferRequest& request, TransferSink& sink) {
    KVASIR_CHECK(!active_);
    if (auto ready = prepare(request); !ready) return ready;
    sink_ = &sink;
    head_ = {};
    head_bytes_ = 0;
    head_complete_ = head_too_long_ = paused_ = false;
    progress_ = true;
    error_text_[0] = '\0';
    const CURLMcode code = curl_multi_add_handle(all_.multi_, easy_);
    if (code != CURLM_OK) {
        return fail(Errc::kEnvironment, std::string("libcurl: ") + curl_multi_strerror(code));
    }
    active_ = true;
    return {};
}

void Transfer::stop() {
    if (!active_) return;
    curl_multi_remove_handle(all_.multi_, easy_);
    active_ = paused_ = false;
}

bool Transfer::resume() {
    if (!active_ || !paused_) return true;
    paused_ = false;  // the sink may pause again at once
    progress_ = true;
    return curl_easy_pause(easy_, CURLPAUSE_CONT) == CURLE_OK;
}

size_t Transfer::header_callback(char* data, size_t size, size_t count, void* self) {
    return static_cast<Transfer*>(self)->on_header_line({data, size * count});
}

// Lines of 1xx replies come first, trailers last: neither is the reply's head.
size_t Transfer::on_header_line(std::string_view line) {
    progress_ = true;
    head_bytes_ += line.size();
    if (head_bytes_ > kHeadBytesMax) {
        head_too_long_ = true;
        return 0;
    }
    if (head_complete_) return line.size();
    const std::string_view text = trimmed(line);
    if (line.starts_with("HTTP/")) {
        head_ = {};
        long status = 0;
        curl_easy_getinfo(easy_, CURLINFO_RESPONSE_CODE, &status);
        head_.status = static_cast<int>(status);
        return line.size();
    }
    if (!text.empty()) {
        const size_t colon = text.find(':');
        if (colon != text.npos) {
            head_.headers.emplace_back(lower(trimmed(text.substr(0, colon))),
                                       std::string(trimmed(text.substr(colon + 1))));
        }
        return line.size();
    }
    if (head_.status < 200) return line.size();
    head_complete_ = true;
    return sink_->on_head(*this) == Take::kStop ? 0 : line.size();
}

size_t Transfer::body_callback(char* data, size_t size, size_t count, void* self) {
    Transfer& transfer = *static_cast<Transfer*>(self);
    const size_t bytes = size * count;
    transfer.progress_ = true;
    if (!transfer.head_complete_) return 0;
    switch (transfer.sink_->on_body(transfer, {reinterpret_cast<const uint8_t*>(data), bytes})) {
        case Take::kMore:
            return bytes;
        case Take::kPause:
            transfer.paused_ = true;
            return CURL_WRITEFUNC_PAUSE;
        case Take::kStop:
            break;
    }
    return bytes == 0 ? 1 : 0;  // anything but `bytes` ends it
}

Error Transfer::error(CURLcode result) const {
    if (head_too_long_) return {Errc::kLimit, "more than 64 KiB of reply headers"};
    const std::string text =
        printable(error_text_[0] != '\0' ? error_text_ : curl_easy_strerror(result));
    switch (result) {
        case CURLE_URL_MALFORMAT:
        case CURLE_UNSUPPORTED_PROTOCOL:
            return {Errc::kUsage, text};
        case CURLE_SSL_PINNEDPUBKEYNOTMATCH:
            return {Errc::kDenied, std::string(kNotThePinnedKey) +
                                       " (another server, or a new key): " + trust_.pin_advice};
        case CURLE_PEER_FAILED_VERIFICATION:
        case CURLE_SSL_ISSUER_ERROR:
        case CURLE_SSL_INVALIDCERTSTATUS: {
            long verified = 0;
            curl_easy_getinfo(easy_, CURLINFO_SSL_VERIFYRESULT, &verified);
            const std::string advice =
                is_issuer_unknown(verified) ? "; " + trust_.advice : std::string();
            return {Errc::kDenied, "the server's certificate is not accepted: " + text + advice};
        }
        case CURLE_SSL_CACERT_BADFILE:
            return {Errc::kEnvironment, "no usable certificates in " + printable(trust_.ca_file)};
        case CURLE_OPERATION_TIMEDOUT:
            return {Errc::kTimeout, text};
        case CURLE_OUT_OF_MEMORY:
            return {Errc::kEnvironment, text};
        default:
            return {Errc::kIo, text};
    }
}

}  // namespace kvasir::net
