// A self-signed certificate in a folder: made when it is missing or about to expire.
//
// Private to net/ (TlsServer::self_signed). Thread: any; several processes may do it at once: the
// key that is there first stays. Owns: nothing. Limits: none.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"

namespace kvasir::net {

struct CertificateFiles {
    std::string certificate_path;
    std::string key_path;
};

// What a certificate is made for; tests make others than the usual.
struct CertificateRecipe {
    std::string names;  // subjectAltName as OpenSSL writes it; empty: this machine's
    int valid_days_from = -1;
    int valid_days_to = 825;
};

// dev-cert.pem and dev-key.pem (mode 0600) in `folder`, which is made if it does not exist. The
// certificate names all of `hosts` that are names or addresses; this machine's own addresses only
// since it was made, so that copies of it stay good when they change. Errors: kEnvironment (folder
// not writable), kBadInput (a key is there that is none).
Result<CertificateFiles> ensure_self_signed(const std::string& folder,
                                            const std::vector<std::string>& hosts);

// Writes a certificate by `recipe` for the key of `files`, making the key if there is none.
Status write_certificate(const CertificateFiles& files, const CertificateRecipe& recipe);

}  // namespace kvasir::net
