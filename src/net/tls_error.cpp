#include "net/tls_error.hpp"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

#include "base/log.hpp"

namespace kvasir::net {
namespace {

std::string certificate_error_text(long code) {
    switch (code) {
        case X509_V_ERR_APPLICATION_VERIFICATION:
            return "its key is not the pinned one";
        case X509_V_ERR_HOSTNAME_MISMATCH:
        case X509_V_ERR_IP_ADDRESS_MISMATCH:
            return "it was issued for another host name";
        case X509_V_ERR_CERT_HAS_EXPIRED:
            return "it has expired";
        case X509_V_ERR_CERT_NOT_YET_VALID:
            return "it is not valid yet; is this machine's clock right?";
        default:
            break;
    }
    const std::string text = X509_verify_cert_error_string(code);
    return is_issuer_unknown(code) ? "its issuer is unknown here (" + text + ")" : text;
}

bool is_certificate_alert(int reason) {
    switch (reason) {
        case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
        case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
        case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
        case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
            return true;
        default:
            return false;
    }
}

}  // namespace

bool is_issuer_unknown(long verify_result) {
    switch (verify_result) {
        case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
        case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
        case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
        case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
        case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
            return true;
        default:
            return false;
    }
}

std::string openssl_error_text() {
    const unsigned long code = ERR_peek_error();
    const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
    ERR_clear_error();
    return reason == nullptr ? "unknown reason" : printable(reason);
}

Error openssl_peer_error(const char* what, ssl_st* ssl) {
    const int reason = ERR_GET_REASON(ERR_peek_error());
    const std::string text = openssl_error_text();
    const std::string start = std::string(what) + ": ";
    if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED) {
        return {Errc::kDenied, start + "the certificate is not accepted: " +
                                   certificate_error_text(SSL_get_verify_result(ssl))};
    }
    if (is_certificate_alert(reason)) {
        return {Errc::kDenied, start + "the other side does not accept the certificate: " + text};
    }
    if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST) {
        return {Errc::kProtocol, start + "the other side does not speak TLS (" + text + ")"};
    }
    return {Errc::kProtocol, start + text};
}

}  // namespace kvasir::net
