#include "net/tls.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "net/openssl_owner.hpp"
#include "net/self_signed.hpp"
#include "net/tls_error.hpp"

namespace kvasir::net {
namespace {

constexpr size_t kPemBytesMax = 4 << 20;
constexpr size_t kReadBufferBytes = 64 << 10;  // of a connection while it reads; freed when idle

using Context = OwnedBy<SSL_CTX, SSL_CTX_free>;
using Certificate = OwnedBy<X509, X509_free>;
using Key = OwnedBy<EVP_PKEY, EVP_PKEY_free>;
using Bio = OwnedBy<BIO, BIO_free>;

Result<std::string> read_pem(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        return fail(Errc::kEnvironment, printable(path) + ": cannot be read: " +
                                            std::generic_category().message(errno));
    }
    std::string text(kPemBytesMax + 1, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (file.bad()) return fail(Errc::kEnvironment, printable(path) + ": cannot be read");
    text.resize(static_cast<size_t>(file.gcount()));
    if (text.size() > kPemBytesMax) return fail(Errc::kBadInput, printable(path) + ": too large");
    return text;
}

Bio memory(const std::string& text) {
    return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// An encrypted key is refused; without this OpenSSL would ask the terminal.
int no_password(char*, int, int, void*) {
    return 0;
}

// What both sides have in common.
Result<Context> make_context(const SSL_METHOD* method) {
    ERR_clear_error();
    Context context(SSL_CTX_new(method));
    if (!context || SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION) != 1) {
        return fail(Errc::kEnvironment, "TLS cannot be used: " + openssl_error_text());
    }
    // An end without TLS's goodbye is an end like that of TCP: messages and bodies know their
    // lengths, so that nothing cut short passes for whole. No tickets: connections are long, and
    // each ticket would cost the server memory and every client a record of no use.
    SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                           SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_NO_TICKET);
    SSL_CTX_set_num_tickets(context.get(), 0);
    SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(context.get(), SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(context.get(), 1);  // one recv() for several records
    SSL_CTX_set_default_read_buffer_len(context.get(), kReadBufferBytes);
    return context;
}

Result<Sha256> pin_of(const X509* certificate) {
    unsigned char* der = nullptr;
    const int size = i2d_X509_PUBKEY(X509_get_X509_PUBKEY(certificate), &der);
    if (size <= 0) return fail(Errc::kBadInput, "no public key: " + openssl_error_text());
    Sha256 pin = {};
    unsigned int pin_bytes = 0;
    const int done =
        EVP_Digest(der, static_cast<size_t>(size), pin.data(), &pin_bytes, EVP_sha256(), nullptr);
    OPENSSL_free(der);
    if (done != 1 || pin_bytes != pin.size()) {
        return fail(Errc::kEnvironment, "SHA-256: " + openssl_error_text());
    }
    return pin;
}

// ---- server ----

class TlsServerImpl final : public TlsServer {
public:
    TlsServerImpl(Context context, const Sha256& pin) : context_(std::move(context)), pin_(pin) {}
    ssl_ctx_st* context() const override { return context_.get(); }
    Sha256 pin() const override { return pin_; }

private:
    Context context_;
    Sha256 pin_;
};

// The first certificate is ours, the others its chain.
Result<Certificate> use_certificates(SSL_CTX* context, const std::string& path) {
    auto text = read_pem(path);
    if (!text) return tl::unexpected(std::move(text.error()));
    const Bio bio = memory(*text);
    Certificate own(PEM_read_bio_X509_AUX(bio.get(), nullptr, no_password, nullptr));
    if (!own) {
        return fail(Errc::kBadInput,
                    printable(path) + ": no certificate in PEM: " + openssl_error_text());
    }
    if (X509_cmp_current_time(X509_get0_notAfter(own.get())) <= 0) {
        return fail(Errc::kBadInput, printable(path) + ": the certificate has expired: renew it");
    }
    if (SSL_CTX_use_certificate(context, own.get()) != 1) {
        return fail(Errc::kBadInput, printable(path) + ": " + openssl_error_text());
    }
    while (X509* next = PEM_read_bio_X509(bio.get(), nullptr, no_password, nullptr)) {
        if (SSL_CTX_add0_chain_cert(context, next) == 1) continue;
        X509_free(next);
        return fail(Errc::kBadInput, printable(path) + ": chain: " + openssl_error_text());
    }
    if (ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) {
        return fail(Errc::kBadInput, printable(path) + ": chain: " + openssl_error_text());
    }
    ERR_clear_error();
    return own;
}

Status use_key(SSL_CTX* context, const std::string& path, const std::string& certificate_path) {
    auto text = read_pem(path);
    if (!text) return tl::unexpected(std::move(text.error()));
    const Key key(PEM_read_bio_PrivateKey(memory(*text).get(), nullptr, no_password, nullptr));
    std::fill(text->begin(), text->end(), '\0');
    if (!key) {
        return fail(Errc::kBadInput, printable(path) + ": no unencrypted private key in PEM: " +
                                         openssl_error_text());
    }
    if (SSL_CTX_use_PrivateKey(context, key.get()) != 1 ||
        SSL_CTX_check_private_key(context) != 1) {
        return fail(Errc::kBadInput, printable(path) + ": not the key of " +
                                         printable(certificate_path) + ": " + openssl_error_text());
    }
    return {};
}

// ---- client ----

class TlsClientImpl final : public TlsClient {
public:
    TlsClientImpl(Context context, ClientTrust trust)
        : context_(std::move(context)), trust_(std::move(trust)) {
        if (trust_.pin) SSL_CTX_set_cert_verify_callback(context_.get(), check_pin, this);
    }
    ssl_ctx_st* context() const override { return context_.get(); }
    const ClientTrust& trust() const override { return trust_; }

private:
    // In place of all of OpenSSL's checks; that the server has the key is TLS's own business.
    static int check_pin(X509_STORE_CTX* store, void* self) {
        const X509* certificate = X509_STORE_CTX_get0_cert(store);
        const auto pin = certificate == nullptr ? Result<Sha256>(Sha256{}) : pin_of(certificate);
        if (pin && *pin == static_cast<TlsClientImpl*>(self)->trust_.pin) {
            X509_STORE_CTX_set_error(store, X509_V_OK);
            return 1;
        }
        X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
        return 0;
    }

    Context context_;
    ClientTrust trust_;
};

Status use_roots(SSL_CTX* context, const std::string& path) {
    auto text = read_pem(path);
    if (!text) return tl::unexpected(std::move(text.error()));
    const Bio bio = memory(*text);
    X509_STORE* store = SSL_CTX_get_cert_store(context);
    size_t count = 0;
    while (
        const Certificate next{PEM_read_bio_X509_AUX(bio.get(), nullptr, no_password, nullptr)}) {
        if (X509_STORE_add_cert(store, next.get()) != 1) {
            return fail(Errc::kBadInput, printable(path) + ": " + openssl_error_text());
        }
        ++count;
    }
    const bool whole = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    const std::string why = openssl_error_text();
    if (count == 0 || !whole) {
        return fail(Errc::kBadInput, printable(path) + ": no certificate in PEM: " + why);
    }
    return {};
}

}  // namespace

Result<std::shared_ptr<const TlsServer>> TlsServer::load(const std::string& certificate_path,
                                                         const std::string& key_path) {
    auto context = make_context(TLS_server_method());
    if (!context) return tl::unexpected(std::move(context.error()));
    auto own = use_certificates(context->get(), certificate_path);
    if (!own) return tl::unexpected(std::move(own.error()));
    auto status = use_key(context->get(), key_path, certificate_path);
    if (!status) return tl::unexpected(std::move(status.error()));
    auto pin = pin_of(own->get());
    if (!pin) return tl::unexpected(std::move(pin.error()));
    return std::make_shared<const TlsServerImpl>(std::move(*context), *pin);
}

Result<std::shared_ptr<const TlsServer>> TlsServer::self_signed(
    const std::string& folder, const std::vector<std::string>& hosts) {
    auto files = ensure_self_signed(folder, hosts);
    if (!files) return tl::unexpected(std::move(files.error()));
    return load(files->certificate_path, files->key_path);
}

Result<std::shared_ptr<const TlsClient>> TlsClient::make(const ClientTrust& trust) {
    auto context = make_context(TLS_client_method());
    if (!context) return tl::unexpected(std::move(context.error()));
    SSL_CTX_set_verify(context->get(), SSL_VERIFY_PEER, nullptr);
    if (!trust.pin && !trust.ca_file.empty()) {
        auto status = use_roots(context->get(), trust.ca_file);
        if (!status) return tl::unexpected(std::move(status.error()));
    } else if (!trust.pin && SSL_CTX_set_default_verify_paths(context->get()) != 1) {
        return fail(Errc::kEnvironment, "the system's root certificates: " + openssl_error_text());
    }
    return std::make_shared<const TlsClientImpl>(std::move(*context), trust);
}

}  // namespace kvasir::net
