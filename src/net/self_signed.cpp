#include "net/self_signed.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>

#include "base/log.hpp"
#include "net/message_stream.hpp"
#include "net/openssl_owner.hpp"
#include "net/own_address.hpp"
#include "net/tls_error.hpp"

namespace kvasir::net {
namespace {

constexpr int kRenewDays = 30;
constexpr int kSerialBits = 127;
constexpr long kSecondsPerDay = 24 * 60 * 60;

using Certificate = OwnedBy<X509, X509_free>;
using Key = OwnedBy<EVP_PKEY, EVP_PKEY_free>;
using Bio = OwnedBy<BIO, BIO_free>;
using Number = OwnedBy<BIGNUM, BN_free>;
using Extension = OwnedBy<X509_EXTENSION, X509_EXTENSION_free>;

tl::unexpected<Error> file_error(const std::string& path, int error) {
    return fail(Errc::kEnvironment,
                printable(path) + ": " + std::generic_category().message(error));
}

int no_password(char*, int, int, void*) {
    return 0;
}

// Writes `text` to a new file of a temporary name beside `path`, and gives that name.
Result<std::string> write_beside(const std::string& path, std::string_view text, mode_t mode) {
    std::array<uint8_t, 8> random = {};
    if (RAND_bytes(random.data(), static_cast<int>(random.size())) != 1) {
        return fail(Errc::kEnvironment, "no random numbers: " + openssl_error_text());
    }
    std::string temporary = path + ".";
    for (const uint8_t byte : random) temporary += static_cast<char>('a' + byte % 26);
    const UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (!fd) return file_error(temporary, errno);
    while (!text.empty()) {
        const ssize_t count = ::write(fd.get(), text.data(), text.size());
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            const int error = count < 0 ? errno : EIO;
            ::unlink(temporary.c_str());
            return file_error(temporary, error);
        }
        text.remove_prefix(static_cast<size_t>(count));
    }
    // Invites carry the key's hash: it must be there after a power cut, too.
    if (::fsync(fd.get()) != 0) {
        const int error = errno;
        ::unlink(temporary.c_str());
        return file_error(temporary, error);
    }
    return temporary;
}

template <class Write>
Result<std::string> to_pem(Write&& write) {
    const Bio bio(BIO_new(BIO_s_mem()));
    char* data = nullptr;
    if (!bio || write(bio.get()) != 1) {
        return fail(Errc::kEnvironment, "cannot write PEM: " + openssl_error_text());
    }
    const long size = BIO_get_mem_data(bio.get(), &data);
    return std::string(data, static_cast<size_t>(size));
}

// ---- the key ----

Result<Key> read_key(const std::string& path) {
    ERR_clear_error();
    const Bio bio(BIO_new_file(path.c_str(), "rb"));
    Key key(bio ? PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr) : nullptr);
    if (!key) {
        return fail(Errc::kBadInput, printable(path) + ": no private key in PEM (" +
                                         openssl_error_text() + "); remove it to get a new one");
    }
    return key;
}

// The key that is there, or a new one. link() does not replace: of two processes that make one, one
// wins and both use it.
Result<Key> ensure_key(const std::string& path) {
    if (::access(path.c_str(), F_OK) == 0) return read_key(path);
    const Key key(EVP_EC_gen("P-256"));
    if (!key) return fail(Errc::kEnvironment, "cannot make a key: " + openssl_error_text());
    auto pem = to_pem([&key](BIO* bio) {
        return PEM_write_bio_PKCS8PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
    });
    if (!pem) return tl::unexpected(std::move(pem.error()));
    auto temporary = write_beside(path, *pem, 0600);
    std::fill(pem->begin(), pem->end(), '\0');
    if (!temporary) return tl::unexpected(std::move(temporary.error()));
    const int linked = ::link(temporary->c_str(), path.c_str());
    const int error = errno;
    ::unlink(temporary->c_str());
    if (linked != 0 && error != EEXIST) return file_error(path, error);
    return read_key(path);
}

// ---- the certificate ----

// A name that may stand in a certificate; also keeps anything else out of the extension's text.
bool is_host_name(std::string_view name) {
    return !name.empty() && name.size() <= 253 &&
           name.find_first_not_of(
               "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
               "0123456789.-") == std::string_view::npos;
}

bool is_address(const std::string& host) {
    std::array<unsigned char, sizeof(in6_addr)> bytes;
    return ::inet_pton(AF_INET, host.c_str(), bytes.data()) == 1 ||
           ::inet_pton(AF_INET6, host.c_str(), bytes.data()) == 1;
}

// As subjectAltName has it; empty: neither name nor address.
std::string alt_name(const std::string& host) {
    if (is_address(host)) return ",IP:" + host;
    return is_host_name(host) ? ",DNS:" + host : std::string();
}

std::string own_names() {
    std::string names = "DNS:localhost,IP:127.0.0.1,IP:::1";
    std::array<char, 256> host = {};
    if (::gethostname(host.data(), host.size() - 1) == 0 && is_host_name(host.data())) {
        names += std::string(",DNS:") + host.data();
    }
    return names;
}

bool add_extension(X509* certificate, int nid, const std::string& value) {
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
    const Extension extension(X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
    return extension && X509_add_ext(certificate, extension.get(), -1) == 1;
}

bool fill_certificate(X509* certificate, EVP_PKEY* key, const CertificateRecipe& recipe) {
    const Number serial(BN_new());
    X509_NAME* name = X509_get_subject_name(certificate);
    const auto* common_name = reinterpret_cast<const unsigned char*>("kvasir");
    const long from = recipe.valid_days_from * kSecondsPerDay;
    const long to = recipe.valid_days_to * kSecondsPerDay;
    return serial && BN_rand(serial.get(), kSerialBits, BN_RAND_TOP_ANY, BN_RAND_BOTTOM_ANY) == 1 &&
           BN_to_ASN1_INTEGER(serial.get(), X509_get_serialNumber(certificate)) != nullptr &&
           X509_set_version(certificate, X509_VERSION_3) == 1 &&
           X509_gmtime_adj(X509_getm_notBefore(certificate), from) != nullptr &&
           X509_gmtime_adj(X509_getm_notAfter(certificate), to) != nullptr &&
           X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, common_name, -1, -1, 0) == 1 &&
           X509_set_issuer_name(certificate, name) == 1 && X509_set_pubkey(certificate, key) == 1 &&
           add_extension(certificate, NID_basic_constraints, "critical,CA:FALSE") &&
           add_extension(certificate, NID_key_usage, "critical,digitalSignature") &&
           add_extension(certificate, NID_ext_key_usage, "serverAuth") &&
           add_extension(certificate, NID_subject_key_identifier, "hash") &&
           add_extension(certificate, NID_subject_alt_name,
                         recipe.names.empty() ? own_names() : recipe.names) &&
           X509_sign(certificate, key, EVP_sha256()) > 0;
}

bool names_host(X509* certificate, const std::string& host) {
    if (is_address(host)) return X509_check_ip_asc(certificate, host.c_str(), 0) == 1;
    return !is_host_name(host) ||
           X509_check_host(certificate, host.c_str(), host.size(), 0, nullptr) == 1;
}

// Is there a certificate for `key` and `hosts` that is good for a while?
bool still_good(const std::string& path, const EVP_PKEY* key,
                const std::vector<std::string>& hosts) {
    const Bio bio(BIO_new_file(path.c_str(), "rb"));
    const Certificate certificate(bio ? PEM_read_bio_X509(bio.get(), nullptr, no_password, nullptr)
                                      : nullptr);
    time_t renew = ::time(nullptr) + kRenewDays * kSecondsPerDay;
    const bool good =
        certificate && X509_cmp_time(X509_get0_notAfter(certificate.get()), &renew) > 0 &&
        EVP_PKEY_eq(X509_get0_pubkey(certificate.get()), key) == 1 &&
        std::ranges::all_of(
            hosts, [&](const std::string& host) { return names_host(certificate.get(), host); });
    ERR_clear_error();
    return good;
}

Status write_for_key(const std::string& path, EVP_PKEY* key, const CertificateRecipe& recipe) {
    const Certificate certificate(X509_new());
    if (!certificate || !fill_certificate(certificate.get(), key, recipe)) {
        return fail(Errc::kEnvironment, "cannot make a certificate: " + openssl_error_text());
    }
    auto pem = to_pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate.get()); });
    if (!pem) return tl::unexpected(std::move(pem.error()));
    auto temporary = write_beside(path, *pem, 0644);
    if (!temporary) return tl::unexpected(std::move(temporary.error()));
    if (::rename(temporary->c_str(), path.c_str()) != 0) {
        const int error = errno;
        ::unlink(temporary->c_str());
        return file_error(path, error);
    }
    return {};
}

}  // namespace

Status write_certificate(const CertificateFiles& files, const CertificateRecipe& recipe) {
    auto key = ensure_key(files.key_path);
    if (!key) return tl::unexpected(std::move(key.error()));
    return write_for_key(files.certificate_path, key->get(), recipe);
}

Result<CertificateFiles> ensure_self_signed(const std::string& folder,
                                            const std::vector<std::string>& hosts) {
    std::error_code ec;
    std::filesystem::create_directories(folder, ec);
    if (ec) return file_error(folder, ec.value());
    CertificateFiles files{folder + "/dev-cert.pem", folder + "/dev-key.pem"};
    auto key = ensure_key(files.key_path);
    if (!key) return tl::unexpected(std::move(key.error()));
    if (!still_good(files.certificate_path, key->get(), hosts)) {
        CertificateRecipe recipe;
        recipe.names = own_names();
        const OwnAddresses own = own_addresses();
        if (own.v4) recipe.names += alt_name(*own.v4);
        if (own.v6) recipe.names += alt_name(*own.v6);
        for (const std::string& host : hosts) recipe.names += alt_name(host);
        auto status = write_for_key(files.certificate_path, key->get(), recipe);
        if (!status) return tl::unexpected(std::move(status.error()));
    }
    return files;
}

}  // namespace kvasir::net
