// Transfer: one HTTP exchange on a libcurl easy handle, without redirects, cookies or decoding.
//
// Private to net/ (the HTTP client). A Transfers object is a libcurl multi handle with its kept
// connections; each Transfer belongs to one and is started again and again. What arrives goes to
// a TransferSink from inside Transfers::turn(). Thread: one at a time per Transfers, except wake().
// Limits: 64 KiB of reply headers.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <curl/curl.h>

#include "base/result.hpp"
#include "net/client.hpp"
#include "net/http_url.hpp"
#include "net/range_reply.hpp"

namespace kvasir::net {

using ClientTimePoint = std::chrono::steady_clock::time_point;

enum class Take { kMore, kPause, kStop };  // kPause: the same bytes come again after resume()

class Transfer;
class TransferSink {
public:
    virtual ~TransferSink() = default;
    // Status and headers are complete (1xx replies are skipped). kStop ends the transfer.
    virtual Take on_head(Transfer& transfer) = 0;
    virtual Take on_body(Transfer& transfer, std::span<const uint8_t> data) = 0;
};

struct TransferRequest {
    std::string method = "GET";
    const HttpUrl* url = nullptr;
    HeaderList headers;
    std::string_view body;  // kept by the caller until the end
    std::chrono::milliseconds connect_timeout{15000};
};

// libcurl's settings of a connection, from ClientTrust. Constant.
struct TransferTrust {
    std::string pin;                 // "sha256//BASE64", or empty
    std::string pin_origin;          // the pin is for this origin only; empty: for all
    std::string ca_file;             // or empty
    std::string advice, pin_advice;  // of ClientTrust
    // Errors: kEnvironment (ca_file cannot be read), kUsage (pin_url).
    static Result<TransferTrust> make(const ClientTrust& trust);
    bool pins(const HttpUrl& url) const {
        return !pin.empty() && (pin_origin.empty() || pin_origin == url.origin());
    }
};

class Transfers final {
public:
    // nullptr: no memory.
    static std::unique_ptr<Transfers> make();
    ~Transfers();
    Transfers(const Transfers&) = delete;
    Transfers& operator=(const Transfers&) = delete;

    void keep_connections(uint32_t count);
    // Does what can be done now without waiting. Errors: kEnvironment.
    Status turn();
    // The next transfer that ended, with libcurl's result; nullptr: none.
    Transfer* ended(CURLcode& result);
    // Waits for the sockets, for wake(), or the time.
    void wait(std::chrono::milliseconds timeout);
    // From any thread.
    void wake();

private:
    friend class Transfer;
    explicit Transfers(CURLM* multi) : multi_(multi) {}
    CURLM* const multi_;
};

class Transfer final {
public:
    Transfer(Transfers& all, const TransferTrust& trust) : all_(all), trust_(trust) {}
    ~Transfer();
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // Errors: kUsage (method or header that cannot be sent), kEnvironment.
    Status start(const TransferRequest& request, TransferSink& sink);
    // Drops the exchange; its connection is kept only if the reply had ended.
    void stop();
    // false: the sink stopped the transfer while it took what had been held back.
    bool resume();

    bool active() const { return active_; }
    bool paused() const { return paused_; }
    const ReplyHead& head() const { return head_; }
    bool has_head() const { return head_complete_; }
    // Set at the start and by every byte; the owner measures stalls by it.
    bool take_progress() { return std::exchange(progress_, false); }
    // What libcurl's result means, "connect: refused" without the URL. Errors' codes: kDenied,
    // kTimeout, kEnvironment, kIo.
    Error error(CURLcode result) const;

private:
    Status prepare(const TransferRequest& request);
    // Every option used exists in the library we link: a failure is memory, and fails prepare().
    template <class T>
    void set(CURLoption option, T value) {
        set_failed_ = curl_easy_setopt(easy_, option, value) != CURLE_OK || set_failed_;
    }
    Status add_header(const std::string& name, const std::string& value);
    void set_trust(const HttpUrl& url);
    void set_body(const TransferRequest& request);
    size_t on_header_line(std::string_view line);
    static size_t header_callback(char* data, size_t size, size_t count, void* self);
    static size_t body_callback(char* data, size_t size, size_t count, void* self);

    Transfers& all_;
    const TransferTrust& trust_;
    CURL* easy_ = nullptr;
    curl_slist* header_lines_ = nullptr;
    TransferSink* sink_ = nullptr;
    ReplyHead head_;
    size_t head_bytes_ = 0;
    bool head_complete_ = false;
    bool head_too_long_ = false;
    bool active_ = false;
    bool paused_ = false;
    bool progress_ = false;
    bool set_failed_ = false;
    char error_text_[CURL_ERROR_SIZE] = {};
};

}  // namespace kvasir::net
