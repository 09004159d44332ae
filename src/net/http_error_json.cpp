// error_response(): an Error as the body of an HTTP answer.
#include <nlohmann/json.hpp>

#include "net/http.hpp"

namespace kvasir::net {

HttpResponse error_response(const Error& error) {
    const ErrcInfo& info = errc_info(error.code);
    const nlohmann::json body = {
        {"error", {{"code", info.name}, {"message", error.detail}, {"retryable", info.retryable}}}};
    HttpResponse response;
    response.status = info.http_status;
    // Bytes that are no UTF-8 (a detail may quote a peer) are replaced; the default throws.
    response.body = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    return response;
}

}  // namespace kvasir::net
