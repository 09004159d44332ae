# Where llama.cpp v0.5.0 is: its source tree (for headers, ggml-backend-impl.h included) and its built libraries.
# `./run build` makes both in a cache folder and passes KVASIR_LLAMA_DIR; with an installed llama.cpp set
# KVASIR_LLAMA_SOURCE and KVASIR_LLAMA_LIB by hand.
set(KVASIR_LLAMA_DIR "" CACHE PATH "folder with src/ and build/ of llama.cpp v0.5.0")
set(KVASIR_LLAMA_SOURCE "${KVASIR_LLAMA_DIR}/src" CACHE PATH "llama.cpp source tree")
set(KVASIR_LLAMA_LIB "${KVASIR_LLAMA_DIR}/build/bin" CACHE PATH "folder of libllama.so, libggml*.so and the ggml backends")
if (NOT EXISTS "${KVASIR_LLAMA_SOURCE}/ggml/src/ggml-backend-impl.h")
    message(FATAL_ERROR "llama.cpp not found: use `./run build`, or pass -DKVASIR_LLAMA_DIR=<folder with src/ and build/ of llama.cpp v0.5.0>")
endif()

function(kvasir_import name file)
    add_library(${name} SHARED IMPORTED GLOBAL)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${KVASIR_LLAMA_LIB}/${file}")
    target_include_directories(${name} SYSTEM INTERFACE "${KVASIR_LLAMA_SOURCE}/ggml/include" "${KVASIR_LLAMA_SOURCE}/include")
endfunction()
kvasir_import(llama_ggml_base libggml-base.so)
kvasir_import(llama_ggml libggml.so)
kvasir_import(llama_llama libllama.so)
target_link_libraries(llama_ggml INTERFACE llama_ggml_base)
target_link_libraries(llama_llama INTERFACE llama_ggml)
set(CMAKE_BUILD_RPATH "${KVASIR_LLAMA_LIB}")
set(CMAKE_INSTALL_RPATH "${KVASIR_LLAMA_LIB}")
# ggml-backend-impl.h: only the plugin may include it.
set(KVASIR_GGML_IMPL_INCLUDE "${KVASIR_LLAMA_SOURCE}/ggml/src")
