#include "llama_server.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>

namespace kvasir::e2e {
namespace {

std::vector<std::string> command_line(const std::string& model, std::vector<std::string> flags) {
    std::vector<std::string> argv = {llama_program("llama-server"),
                                     "-m",
                                     model,
                                     "--no-repack",
                                     "--host",
                                     "127.0.0.1",
                                     "--port",
                                     "0",
                                     "-t",
                                     "1"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    return argv;
}

// Everything the server says to one request, headers included; empty when it does not answer.
std::string ask(unsigned port, const std::string& request) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    timeval patience{120, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::string answer;
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
        send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(request.size())) {
        char buffer[16384];
        ssize_t count = 0;
        while ((count = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
            answer.append(buffer, static_cast<size_t>(count));
        }
    }
    close(fd);
    return answer;
}

}  // namespace

std::string http_post(unsigned port, const std::string& path, const Json& body) {
    const std::string text = body.dump();
    return ask(port, "POST " + path + " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" +
                         "Content-Type: application/json\r\nContent-Length: " +
                         std::to_string(text.size()) + "\r\n\r\n" + text);
}

ProgramOptions with_plugin(const PluginOptions& options) {
    return {{"GGML_BACKEND_PATH=" KVASIR_PLUGIN, "KVASIR_MODEL=" + options.model,
             "KVASIR_LISTEN=127.0.0.1:0", "KVASIR_LOG=" + options.log},
            {},
            120};
}

LlamaServer::LlamaServer(const std::string& model, std::vector<std::string> flags,
                         const ProgramOptions& options)
    : program_(command_line(model, std::move(flags)), options) {
    constexpr const char* kReady = "listening on http://127.0.0.1:";
    EXPECT_TRUE(program_.wait_for(kReady)) << program_.err() << program_.out();
    const std::string port = program_.word_after(kReady);
    port_ = port.empty() ? 0 : static_cast<unsigned>(std::stoul(port));
}

Json chat_request(const std::string& question, unsigned tokens) {
    return {{"messages", {{{"role", "user"}, {"content", question}}}},
            {"temperature", 0},
            {"max_tokens", tokens}};
}

std::string LlamaServer::hub() const {
    return "ws://127.0.0.1:" + program_.word_after("workers may join on port ");
}

bool LlamaServer::wait_experts(unsigned experts) {
    const std::string count = std::to_string(experts);
    return program_.wait_for("workers hold " + count + " of " + count + " experts");
}

Json LlamaServer::post(const std::string& path, const Json& body) const {
    const std::string answer = http_post(port_, path, body);
    const size_t begin = answer.find("\r\n\r\n");
    const std::string content = begin == std::string::npos ? "" : answer.substr(begin + 4);
    if (answer.rfind("HTTP/1.1 200", 0) != 0 || !Json::accept(content)) {
        const std::string state =
            program_.running() ? "still runs" : std::to_string(program_.wait().exit_code);
        ADD_FAILURE() << path << ": '" << answer << "', server: " << state << "\n"
                      << program_.err();
        return nullptr;
    }
    return Json::parse(content);
}

std::string LlamaServer::chat(const std::string& question, unsigned tokens) const {
    const Json answer = post("/v1/chat/completions", chat_request(question, tokens));
    if (answer.is_null()) return {};
    return answer["choices"][0]["message"]["content"].get<std::string>();
}

std::string LlamaServer::log() const {
    std::istringstream all(program_.err());
    std::string out;
    for (std::string line; std::getline(all, line);) {
        if (line.rfind("kvasir ", 0) == 0) out += line + "\n";
    }
    return out;
}

}  // namespace kvasir::e2e
