#Enables the language CUDA where nvcc is found(CUDACXX, PATH, CUDA_PATH, CUDA_HOME, the usual folder) and \
    sets NCCLFFM_CUDA to
#say whether it is.Included by the topmost CMakeLists.txt, which is where CMake wants languages enabled.
include(CheckLanguage)

    set(NCCLFFM_CUDA OFF) if (NCCLFFM_SANITIZER) message(
        STATUS "ncclffm_cuda: not built, a build with NCCLFFM_SANITIZER is for the CPU backend") return () endif()

        if (NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
            find_program(NCCLFFM_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS / usr / local /
                         cuda PATH_SUFFIXES bin) if (NCCLFFM_NVCC) set(CMAKE_CUDA_COMPILER ${NCCLFFM_NVCC}) endif()
                endif() if (NOT DEFINED CMAKE_CUDA_ARCHITECTURES) set(NCCLFFM_DEFAULT_ARCHITECTURES ON)
                    set(CMAKE_CUDA_ARCHITECTURES 80) endif() check_language(CUDA) if (NOT CMAKE_CUDA_COMPILER) message(
                        STATUS
                        "ncclffm_cuda: not built, no nvcc found (set CUDACXX, or put nvcc on the PATH)") return ()
                        endif()

                            enable_language(CUDA) set(NCCLFFM_CUDA ON) set(CMAKE_CUDA_STANDARD 17)
                                set(CMAKE_CUDA_STANDARD_REQUIRED ON) set(CMAKE_CUDA_EXTENSIONS OFF)
                                    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
                                        set(CMAKE_CUDA_VISIBILITY_PRESET hidden) if (NCCLFFM_DEFAULT_ARCHITECTURES) if (
                                            CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
                                            set(CMAKE_CUDA_ARCHITECTURES 80 - real 90 - real 90 - virtual) else()
                                                set(CMAKE_CUDA_ARCHITECTURES 80 - real 90 - real 100 - real 100 -
                                                    virtual) endif() endif()
                                                    message(STATUS
                                                            "ncclffm_cuda: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, "
                                                            "architectures ${CMAKE_CUDA_ARCHITECTURES}")
