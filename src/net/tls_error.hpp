// What OpenSSL's error queue and certificate checks mean, in sentences.
//
// Private to net/. Thread: any; the queue is the calling thread's. Owns: nothing.
#pragma once

#include <string>

#include "base/result.hpp"

struct ssl_st;

namespace kvasir::net {

// The first reason in the queue, or "unknown reason"; empties the queue.
std::string openssl_error_text();

// Of a certificate check's result (X509_V_...): nobody whom we know vouches for the certificate.
bool is_issuer_unknown(long verify_result);

// Why the handshake or a record failed: kDenied with the reason when the peer's certificate was
// not accepted (by us or by the peer), else kProtocol. Empties the queue.
Error openssl_peer_error(const char* what, ssl_st* ssl);

}  // namespace kvasir::net
