package io.ncclffm.device.doctor;

/**
 * One thing that the doctor has looked at.
 *
 * @param id what docs/doctor.md lists it by
 * @param seen what is so, in one or more lines
 * @param remedy what to do about it; empty where nothing needs doing
 */
record Finding(String id, Severity severity, String seen, String remedy) {
  enum Severity {
    OK,
    /** Good to know. */
    INFO,
    /** Works, but slowly, in part, or not for long. */
    WARNING,
    /** Does not work. */
    ERROR
  }

  Finding {
    if (remedy.isBlank() && severity.compareTo(Severity.WARNING) >= 0) {
      throw new IllegalArgumentException(id + ": a " + severity + " needs a remedy");
    }
  }

  static Finding ok(String id, String seen) {
    return new Finding(id, Severity.OK, seen, "");
  }

  static Finding info(String id, String seen) {
    return new Finding(id, Severity.INFO, seen, "");
  }

  static Finding warning(String id, String seen, String remedy) {
    return new Finding(id, Severity.WARNING, seen, remedy);
  }

  static Finding error(String id, String seen, String remedy) {
    return new Finding(id, Severity.ERROR, seen, remedy);
  }
}
