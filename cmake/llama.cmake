# Where llama.cpp v0.5.0 is: its source tree (for headers, ggml-backend-impl.h included) and its built libraries.
#
# `./run build` makes both in a cache folder (tools/llama.sh) and passes KVASIR_LLAMA_DIR. For a llama.cpp of your own:
#   -DKVASIR_LLAMA_DIR=<checkout>              built in <checkout>/build, sources in <checkout>/src or in <checkout>
#   -DKVASIR_LLAMA_SOURCE=<checkout> -DKVASIR_LLAMA_LIB=<folder of libllama.so>       anything else, an installed one too
# Build it with -DBUILD_SHARED_LIBS=ON and without AMX (-DGGML_AMX_TILE=OFF ..., or a compiler newer than gcc 12).
set(KVASIR_LLAMA_VERSION 0.5.0)
set(KVASIR_LLAMA_HEAD de3ff815ea7d559ee917f063901b8986f038abc6)

set(KVASIR_LLAMA_DIR "" CACHE PATH "folder with src/ and build/ of llama.cpp v${KVASIR_LLAMA_VERSION}")
set(kvasir_llama_source "${KVASIR_LLAMA_DIR}/src")
if (NOT EXISTS "${kvasir_llama_source}/ggml/CMakeLists.txt" AND EXISTS "${KVASIR_LLAMA_DIR}/ggml/CMakeLists.txt")
    set(kvasir_llama_source "${KVASIR_LLAMA_DIR}")
endif()
set(KVASIR_LLAMA_SOURCE "${kvasir_llama_source}" CACHE PATH "llama.cpp source tree")
set(KVASIR_LLAMA_LIB "${KVASIR_LLAMA_DIR}/build/bin" CACHE PATH "folder of libllama.so, libggml*.so and the ggml backends")

set(kvasir_llama_hint "Use `./run build`, which makes one, or pass -DKVASIR_LLAMA_DIR=<folder with src/ and build/>, "
    "or -DKVASIR_LLAMA_SOURCE=<source tree> and -DKVASIR_LLAMA_LIB=<folder of the built libraries>.")
string(CONCAT kvasir_llama_hint ${kvasir_llama_hint})
foreach (file ggml/src/ggml-backend-impl.h ggml/include/ggml-backend.h include/llama.h)
    if (NOT EXISTS "${KVASIR_LLAMA_SOURCE}/${file}")
        message(FATAL_ERROR "The source of llama.cpp v${KVASIR_LLAMA_VERSION} is not in '${KVASIR_LLAMA_SOURCE}': "
                            "${file} is missing. ${kvasir_llama_hint}")
    endif()
endforeach()
foreach (library llama ggml ggml-base)
    if (NOT EXISTS "${KVASIR_LLAMA_LIB}/lib${library}.so")
        message(FATAL_ERROR "lib${library}.so of llama.cpp v${KVASIR_LLAMA_VERSION} is not in '${KVASIR_LLAMA_LIB}' "
                            "(a static build will not do: the plugin shares ggml with the program). ${kvasir_llama_hint}")
    endif()
endforeach()

# A different version may still compile; whether it gives the same bits nobody has measured.
function(kvasir_check_llama_version)
    file(STRINGS "${KVASIR_LLAMA_SOURCE}/CMakeLists.txt" lines REGEX "^set\\(LLAMA_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+\\)")
    string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
    string(REPLACE ";" "." found "${numbers}")
    if (NOT found STREQUAL KVASIR_LLAMA_VERSION)
        message(WARNING "llama.cpp in ${KVASIR_LLAMA_SOURCE} is version '${found}'; Kvasir is written for and tested "
                        "with ${KVASIR_LLAMA_VERSION} (commit ${KVASIR_LLAMA_HEAD}).")
        return()
    endif()
    if (EXISTS "${KVASIR_LLAMA_SOURCE}/.git")
        execute_process(COMMAND git -c safe.directory=* -C "${KVASIR_LLAMA_SOURCE}" rev-parse HEAD
                        OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
        if (NOT failed AND NOT head STREQUAL KVASIR_LLAMA_HEAD)
            message(WARNING "llama.cpp in ${KVASIR_LLAMA_SOURCE} is at commit ${head}; Kvasir is tested with "
                            "${KVASIR_LLAMA_HEAD}.")
        endif()
    endif()
    # Headers of one version with libraries of another would go wrong at run time, so that is an error.
    file(REAL_PATH "${KVASIR_LLAMA_LIB}/libllama.so" library)
    if (library MATCHES "libllama\\.so\\.([0-9.]+)$" AND NOT CMAKE_MATCH_1 STREQUAL KVASIR_LLAMA_VERSION)
        message(FATAL_ERROR "The sources in ${KVASIR_LLAMA_SOURCE} are version ${found} but ${library} is "
                            "version ${CMAKE_MATCH_1}: point KVASIR_LLAMA_SOURCE and KVASIR_LLAMA_LIB at one build.")
    endif()
endfunction()

# ggml's AMX kernels compiled by gcc 12 die with SIGILL on CPUs that have AMX. tools/llama.sh builds without them; a
# llama.cpp of the user's own may contain them (CPU backends are libggml-cpu*.so, a list where all variants are built).
function(kvasir_check_llama_amx)
    file(GLOB backends "${KVASIR_LLAMA_LIB}/libggml-cpu*.so")
    if (NOT backends)
        message(WARNING "No libggml-cpu*.so in ${KVASIR_LLAMA_LIB}: ggml must find its CPU backend elsewhere.")
    endif()
    foreach (backend ${backends})
        file(STRINGS "${backend}" amx REGEX "ggml_backend_amx_mul_mat" LIMIT_COUNT 1)
        file(STRINGS "${backend}" gcc REGEX "^GCC: .* (9|10|11|12)\\.[0-9]+\\.[0-9]+" LIMIT_COUNT 1)
        if (amx AND gcc)
            message(WARNING "${backend} contains AMX kernels compiled by ${gcc}: they die with SIGILL as soon as a "
                            "repacked buffer is used. Rebuild llama.cpp with -DGGML_NATIVE=OFF -DGGML_AMX_TILE=OFF "
                            "-DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF, or never run it without --no-repack.")
        endif()
    endforeach()
endfunction()

kvasir_check_llama_version()
kvasir_check_llama_amx()

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
