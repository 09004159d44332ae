# The expert kernels: one file per instruction set, each with its own flags. What decides at run time which of them
# runs is src/engine/kernels/kernels.cpp. Products are fused only where the source says so (-ffp-contract=off), and
# comparisons of numbers may become selections (-fno-trapping-math): neither changes a bit.
function(kvasir_add_kernels target folder)
    set(sources kernels gelu reference)
    set(flags_avx2 -mavx2 -mfma -mf16c -mbmi2)
    set(flags_avxvnni ${flags_avx2} -mavxvnni)
    set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni)
    set(flags_neon)
    set(flags_neon_dot -march=armv8.2-a+dotprod)
    if (CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
        # Several intrinsics of g++ 12 start from a register that they leave undefined, and the compiler says so.
        list(APPEND flags_avx512 -Wno-maybe-uninitialized -Wno-uninitialized)
    endif()
    if (CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        set(sets avx2 avxvnni avx512)
    elseif (CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
        set(sets neon neon_dot)
    endif()
    foreach (source ${sources})
        set_source_files_properties(${folder}/${source}.cpp TARGET_DIRECTORY ${target} PROPERTIES
            COMPILE_OPTIONS "-O3;-ffp-contract=off;-fno-trapping-math")
        target_sources(${target} PRIVATE ${folder}/${source}.cpp)
    endforeach()
    foreach (set ${sets})
        set_source_files_properties(${folder}/kernels_${set}.cpp TARGET_DIRECTORY ${target} PROPERTIES
            COMPILE_OPTIONS "-O3;-ffp-contract=off;-fno-trapping-math;${flags_${set}}")
        target_sources(${target} PRIVATE ${folder}/kernels_${set}.cpp)
    endforeach()
endfunction()
