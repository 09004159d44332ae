// OwnedBy: a unique_ptr of an object of OpenSSL, with the function that frees it.
//
// Private to net/ (tls.cpp, self_signed.cpp). Thread: as the object. Owns: the object. Limits:
// none.
#pragma once

#include <memory>

namespace kvasir::net {

template <auto Free>
struct Freer {
    template <class T>
    void operator()(T* object) const {
        Free(object);
    }
};
template <class T, auto Free>
using OwnedBy = std::unique_ptr<T, Freer<Free>>;

}  // namespace kvasir::net
