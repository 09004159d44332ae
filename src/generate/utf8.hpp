// Utf8Stream: cuts a byte stream of tokens at character boundaries.
//
// Used by Session while streaming: a token may end in the middle of a character. Bytes that can
// never become a character are passed through at once; making them safe is the printer's job.
// Thread: value. Owns: at most three held-back bytes.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::generate {

class Utf8Stream {
public:
    // Appends `bytes` and returns everything up to the last character boundary.
    std::string push(std::string_view bytes);
    // What is still held back: an unfinished character at the end of the stream.
    std::string finish();

private:
    std::string held_;
};

// Length of the unfinished character at the end of `text` (0..3); 0 when the tail is complete or
// can never be completed.
size_t unfinished_tail_bytes(std::string_view text);

}  // namespace kvasir::generate
