// A self-signed TLS identity for a TestOrigin, made on the spot.
//
// Thread: immutable. Owns: the context. Limits: tests only.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "base/check.hpp"
#include "base/ids.hpp"

namespace kvasir::net::testing {

class TlsIdentity {
public:
    // `names` as in a certificate: "DNS:localhost,IP:127.0.0.1"; `days`: valid from now.
    explicit TlsIdentity(const std::string& names, int days = 10) {
        EVP_PKEY* key = EVP_EC_gen("P-256");
        X509* certificate = X509_new();
        KVASIR_CHECK(key != nullptr && certificate != nullptr);
        X509_set_version(certificate, 2);
        ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
        X509_gmtime_adj(X509_getm_notBefore(certificate), -86400L * 20);
        X509_gmtime_adj(X509_getm_notAfter(certificate), 86400L * days);
        X509_set_pubkey(certificate, key);
        X509_NAME* name = X509_get_subject_name(certificate);
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                                   reinterpret_cast<const unsigned char*>("test"), -1, -1, 0);
        X509_set_issuer_name(certificate, name);
        X509_EXTENSION* alternative =
            X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, names.c_str());
        KVASIR_CHECK(alternative != nullptr);
        X509_add_ext(certificate, alternative, -1);
        X509_EXTENSION_free(alternative);
        KVASIR_CHECK(X509_sign(certificate, key, EVP_sha256()) > 0);
        context_ = SSL_CTX_new(TLS_server_method());
        KVASIR_CHECK(SSL_CTX_use_certificate(context_, certificate) == 1);
        KVASIR_CHECK(SSL_CTX_use_PrivateKey(context_, key) == 1);
        unsigned char* der = nullptr;
        const int bytes = i2d_PUBKEY(key, &der);
        KVASIR_CHECK(bytes > 0);
        EVP_Digest(der, static_cast<size_t>(bytes), pin_.data(), nullptr, EVP_sha256(), nullptr);
        OPENSSL_free(der);
        BIO* memory = BIO_new(BIO_s_mem());
        PEM_write_bio_X509(memory, certificate);
        char* text = nullptr;
        const long size = BIO_get_mem_data(memory, &text);
        pem_.assign(text, static_cast<size_t>(size));
        BIO_free(memory);
        X509_free(certificate);
        EVP_PKEY_free(key);
    }
    ~TlsIdentity() { SSL_CTX_free(context_); }
    TlsIdentity(const TlsIdentity&) = delete;
    TlsIdentity& operator=(const TlsIdentity&) = delete;

    SSL_CTX* context() const { return context_; }
    const Sha256& pin() const { return pin_; }
    const std::string& pem() const { return pem_; }

private:
    SSL_CTX* context_ = nullptr;
    Sha256 pin_ = {};
    std::string pem_;
};

}  // namespace kvasir::net::testing
