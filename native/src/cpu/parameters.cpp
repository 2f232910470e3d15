// ncclParam*: a few of NCCL's parameters, with NCCL's types and defaults. Values come from the environment; numbers are
// written as numbers. Nothing in this backend obeys them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "error.h"

struct ncclParamHandle {
  const char *key;
  int bytes;            // of a number; 0 = text
  const char *initial;  // null = unset
};

namespace ncclffm::cpu {

namespace {

constexpr ncclParamHandle kParameters[] = {
    {"NCCL_DEBUG_FILE", 0, nullptr},
    {"NCCL_DEBUG_SUBSYS", 8, "4225"},  // INIT, ENV and BOOTSTRAP
    {"NCCL_DEBUG_TIMESTAMP_FORMAT", 0, "[%F %T] "},
    {"NCCL_DEBUG_TIMESTAMP_LEVELS", 4, "4"},  // WARN
};
constexpr int kParameterCount = sizeof(kParameters) / sizeof(kParameters[0]);

bool isNumber(const char *text) {
  char *end = nullptr;
  (void)std::strtoull(text, &end, 10);
  return end != text && *end == '\0' && *text != '-';
}

/// The text of a parameter now, or null when it has none.
const char *textOf(const ncclParamHandle &parameter) {
  const char *text = std::getenv(parameter.key);
  return text != nullptr && (parameter.bytes == 0 || isNumber(text)) ? text : parameter.initial;
}

const ncclParamHandle *find(const char *key) {
  for (const ncclParamHandle &parameter : kParameters) {
    if (std::strcmp(parameter.key, key) == 0) {
      return &parameter;
    }
  }
  return nullptr;
}

const ncclParamHandle &known(const char *function, const ncclParamHandle *handle, const void *out) {
  if (handle < kParameters || handle >= kParameters + kParameterCount || out == nullptr) {
    throw NcclFailure(ncclInvalidArgument, format("%s: the handle is not from ncclParamBind or out is NULL", function));
  }
  return *handle;
}

/// The parameters here are unsigned, of 4 and 8 bytes; any other type is refused, as NCCL does.
template <class T>
ncclResult_t getNumber(const char *function, const ncclParamHandle *handle, T *out) {
  return guardNccl(function, [&] {
    const ncclParamHandle &parameter = known(function, handle, out);
    if (parameter.bytes != static_cast<int>(sizeof(T)) || static_cast<T>(-1) < static_cast<T>(0)) {
      throw NcclFailure(ncclInvalidArgument, format("%s: %s has another type", function, parameter.key));
    }
    *out = static_cast<T>(std::strtoull(textOf(parameter), nullptr, 10));
    return ncclSuccess;
  });
}

}  // namespace

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key) {
  return guardNccl("ncclParamBind", [&] {
    const ncclParamHandle *found = out == nullptr || key == nullptr ? nullptr : find(key);
    if (found == nullptr) {
      throw NcclFailure(ncclInvalidArgument, format("ncclParamBind: out or key is NULL or there is no parameter %s",
                                                    key == nullptr ? "NULL" : key));
    }
    *out = const_cast<ncclParamHandle *>(found);
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGetI8(ncclParamHandle_t handle, int8_t *out) {
  return getNumber("ncclParamGetI8", handle, out);
}

ncclResult_t ncclParamGetI16(ncclParamHandle_t handle, int16_t *out) {
  return getNumber("ncclParamGetI16", handle, out);
}

ncclResult_t ncclParamGetI32(ncclParamHandle_t handle, int32_t *out) {
  return getNumber("ncclParamGetI32", handle, out);
}

ncclResult_t ncclParamGetI64(ncclParamHandle_t handle, int64_t *out) {
  return getNumber("ncclParamGetI64", handle, out);
}

ncclResult_t ncclParamGetU8(ncclParamHandle_t handle, uint8_t *out) {
  return getNumber("ncclParamGetU8", handle, out);
}

ncclResult_t ncclParamGetU16(ncclParamHandle_t handle, uint16_t *out) {
  return getNumber("ncclParamGetU16", handle, out);
}

ncclResult_t ncclParamGetU32(ncclParamHandle_t handle, uint32_t *out) {
  return getNumber("ncclParamGetU32", handle, out);
}

ncclResult_t ncclParamGetU64(ncclParamHandle_t handle, uint64_t *out) {
  return getNumber("ncclParamGetU64", handle, out);
}

// Valid until the thread's next call, as are the results of the functions below.
ncclResult_t ncclParamGetStr(ncclParamHandle_t handle, const char **out) {
  return guardNccl("ncclParamGetStr", [&] {
    const ncclParamHandle &parameter = known("ncclParamGetStr", handle, out);
    if (parameter.bytes != 0) {
      throw NcclFailure(ncclInvalidArgument, format("ncclParamGetStr: %s is a number", parameter.key));
    }
    thread_local std::string value;
    const char *text = textOf(parameter);
    value = text == nullptr ? "" : text;
    *out = value.c_str();
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGet(ncclParamHandle_t handle, void *out, int maxLen, int *len) {
  return guardNccl("ncclParamGet", [&] {
    const ncclParamHandle &parameter = known("ncclParamGet", handle, out);
    if (len == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclParamGet: len is NULL");
    }
    const char *text = textOf(parameter);
    const uint64_t number = parameter.bytes == 0 ? 0 : std::strtoull(text, nullptr, 10);
    const void *from = parameter.bytes == 0 ? static_cast<const void *>(text) : &number;
    const int bytes = parameter.bytes != 0 ? parameter.bytes
                      : text == nullptr    ? 0
                                           : static_cast<int>(std::strlen(text)) + 1;
    *len = bytes <= maxLen ? bytes : 0;
    if (bytes > maxLen) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclParamGet: %s needs %d bytes, maxLen is %d", parameter.key, bytes, maxLen));
    }
    if (bytes > 0) {
      std::memcpy(out, from, static_cast<size_t>(bytes));
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *valueLen) {
  return guardNccl("ncclParamGetParameter", [&] {
    if (key == nullptr || value == nullptr || valueLen == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclParamGetParameter: an argument is NULL");
    }
    const ncclParamHandle *found = find(key);
    *value = nullptr;
    *valueLen = 0;
    if (found == nullptr) {
      throw NcclFailure(ncclInvalidArgument, format("ncclParamGetParameter: there is no parameter %s", key));
    }
    thread_local std::string copy;
    const char *text = textOf(*found);
    copy = text == nullptr ? "" : text;
    *value = copy.c_str();
    *valueLen = static_cast<int>(copy.size());
    return ncclSuccess;
  });
}

ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *tableLen) {
  return guardNccl("ncclParamGetAllParameterKeys", [&] {
    if (table == nullptr || tableLen == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclParamGetAllParameterKeys: an argument is NULL");
    }
    thread_local const char *keys[kParameterCount];
    for (int i = 0; i < kParameterCount; ++i) {
      keys[i] = kParameters[i].key;
    }
    *table = keys;
    *tableLen = kParameterCount;
    return ncclSuccess;
  });
}

void ncclParamDumpAll(void) {
  for (const ncclParamHandle &parameter : kParameters) {
    const char *text = textOf(parameter);
    std::printf("%s=%s\n", parameter.key, text == nullptr ? "<unset>" : text);
  }
}
