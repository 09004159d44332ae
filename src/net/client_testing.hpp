// What the tests of the HTTP client share: a collecting sink, a clock without waiting, and the
// check that no secret came out in an error or a log line.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "net/client.hpp"
#include "net/client_time.hpp"
#include "net/origin_testing.hpp"

namespace kvasir::net::testing {

inline const std::string kToken = "hf_S3cretT0ken";
inline const std::string kSignature = "sIgn4tuRe%2BabC";     // as in a URL
inline const std::string kSignaturePlain = "sIgn4tuRe+abC";  // as servers echo it
inline const std::string kSignedQuery = "?Expires=1893456789&sig=" + kSignature;

inline std::string pattern(size_t bytes, uint32_t seed) {
    std::string out(bytes, '\0');
    uint32_t state = seed * 2654435761u + 1;
    for (char& c : out) {
        state = state * 1664525u + 1013904223u;
        c = static_cast<char>(state >> 24);
    }
    return out;
}

inline std::mutex g_log_mu;
inline std::vector<std::string> g_log_lines;

// Pauses with nothing under way take no time, and are written down.
class SkippingTime final : public ClientTime {
public:
    Point now() override { return ClientTime::now() + skipped_; }
    std::time_t wall() override { return wall_; }
    void idle_until(Point until) override {
        const auto pause = until - now();
        if (pause <= pause.zero()) return;
        skipped_ += pause;
        pauses.push_back(std::chrono::duration_cast<std::chrono::milliseconds>(pause));
    }
    std::chrono::milliseconds total() const {
        std::chrono::milliseconds sum{0};
        for (const auto pause : pauses) sum += pause;
        return sum;
    }
    std::vector<std::chrono::milliseconds> pauses;

private:
    std::chrono::steady_clock::duration skipped_{0};
    const std::time_t wall_ = 1700000000;  // Tue, 14 Nov 2023 22:13:20 GMT
};

class ClientTest : public ::testing::Test {
protected:
    void SetUp() override {
        {
            const std::lock_guard lock(g_log_mu);
            g_log_lines.clear();
        }
        set_log_sink(
            [](LogLevel, std::string_view, std::string_view line) {
                const std::lock_guard lock(g_log_mu);
                g_log_lines.emplace_back(line);
            },
            LogLevel::kDebug);
        client_ = make_client({});
        options_.pause_first = std::chrono::milliseconds(100);
        options_.stall_max = std::chrono::milliseconds(20000);
    }

    void TearDown() override {
        for (const std::string& path : files_) unlink(path.c_str());
        set_log_sink(nullptr, LogLevel::kInfo);
        const std::lock_guard lock(g_log_mu);
        for (const auto* lines : {&g_log_lines, &errors_}) {
            for (const std::string& line : *lines) {
                for (const std::string& secret : {kToken, kSignature, kSignaturePlain}) {
                    EXPECT_EQ(line.find(secret), std::string::npos) << line;
                }
            }
        }
    }

    std::unique_ptr<HttpClient> make_client(const ClientTrust& trust) {
        auto client = make_http_client(trust, time_);
        KVASIR_CHECK(client.has_value());
        return std::move(*client);
    }

    // Goes away with the test.
    std::string write_file(const std::string& name, const std::string& text) {
        const std::string path =
            ::testing::TempDir() + "/kvasir-client-" + std::to_string(getpid()) + "-" + name;
        std::ofstream(path) << text;
        files_.push_back(path);
        return path;
    }

    static RangeJob job(std::string url, uint64_t offset, uint64_t bytes, uint64_t file_bytes = 0,
                        uint64_t tag = 0) {
        return {std::move(url), {{"Authorization", "Bearer " + kToken}},
                offset,         bytes,
                file_bytes,     tag};
    }

    Status download(std::vector<RangeJob> jobs) {
        got_.clear();
        done_.clear();
        Status status = client_->download(
            std::move(jobs), options_,
            [this](const RangeJob& of, uint64_t offset, std::span<const uint8_t> data) -> Status {
                std::string& bytes = got_[of.tag];
                EXPECT_EQ(offset, of.offset + bytes.size());
                bytes.append(reinterpret_cast<const char*>(data.data()), data.size());
                EXPECT_LE(bytes.size(), of.bytes);
                return {};
            },
            [this](const RangeJob& of) -> Status {
                EXPECT_TRUE(done_.insert(of.tag).second);
                EXPECT_EQ(got_[of.tag].size(), of.bytes);
                return {};
            });
        if (!status) errors_.push_back(status.error().detail);
        return status;
    }

    Result<HttpReply> call(const HttpCall& what) {
        Result<HttpReply> reply = client_->call(what);
        if (!reply) errors_.push_back(reply.error().detail);
        return reply;
    }

    // The download of one job fails with `code`, its text has `words`, and nothing is complete.
    void expect_failure(RangeJob what, Errc code, std::string_view words) {
        const Status status = download({std::move(what)});
        ASSERT_FALSE(status);
        EXPECT_EQ(status.error().code, code) << status.error().detail;
        EXPECT_NE(status.error().detail.find(words), std::string::npos) << status.error().detail;
        EXPECT_TRUE(done_.empty());
    }

    static bool logged(std::string_view words) {
        const std::lock_guard lock(g_log_mu);
        return std::any_of(g_log_lines.begin(), g_log_lines.end(), [&](const std::string& line) {
            return line.find(words) != std::string::npos;
        });
    }

    std::shared_ptr<SkippingTime> time_ = std::make_shared<SkippingTime>();
    std::unique_ptr<HttpClient> client_;
    RangeOptions options_;
    std::map<uint64_t, std::string> got_;  // by tag
    std::set<uint64_t> done_;
    std::vector<std::string> errors_;
    std::vector<std::string> files_;
};

}  // namespace kvasir::net::testing
