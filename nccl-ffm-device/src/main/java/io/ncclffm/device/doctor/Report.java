package io.ncclffm.device.doctor;

import java.util.ArrayList;
import java.util.EnumMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/** The findings, by section, and two ways to write them. */
final class Report {
  private record Section(String name, List<Finding> findings) {}

  private final List<Section> sections = new ArrayList<>();

  void add(String section, List<Finding> findings) {
    sections.add(new Section(section, List.copyOf(findings)));
  }

  /** 1 if there is an error among them, else 0. */
  int exitStatus() {
    return count(Finding.Severity.ERROR) > 0 ? 1 : 0;
  }

  private long count(Finding.Severity severity) {
    return sections.stream()
        .flatMap(s -> s.findings.stream())
        .filter(f -> f.severity() == severity)
        .count();
  }

  String text() {
    StringBuilder text = new StringBuilder();
    for (Section section : sections) {
      text.append("== ").append(section.name).append('\n');
      for (Finding f : section.findings) {
        text.append(String.format("%-7s %s: ", f.severity(), f.id()));
        text.append(indented(f.seen())).append('\n');
        if (!f.remedy().isEmpty()) {
          text.append("        remedy: ").append(indented(f.remedy())).append('\n');
        }
      }
    }
    Map<Finding.Severity, Long> counts = new EnumMap<>(Finding.Severity.class);
    for (Finding.Severity severity : Finding.Severity.values()) {
      counts.put(severity, count(severity));
    }
    String sum = counts.toString().toLowerCase(Locale.ROOT).replaceAll("[{}]", "");
    return text.append("== ").append(sum.replace("=", " ")).append('\n').toString();
  }

  private static String indented(String lines) {
    return lines.strip().replace("\n", "\n        ");
  }

  String json() {
    StringBuilder json = new StringBuilder("{\"exitStatus\":").append(exitStatus());
    String separator = ",\"findings\":[";
    for (Section section : sections) {
      for (Finding f : section.findings) {
        json.append(separator).append("\n{\"section\":").append(quoted(section.name));
        json.append(",\"id\":").append(quoted(f.id()));
        json.append(",\"severity\":").append(quoted(f.severity().name()));
        json.append(",\"seen\":").append(quoted(f.seen()));
        json.append(",\"remedy\":").append(quoted(f.remedy())).append('}');
        separator = ",";
      }
    }
    return json.append("]}\n").toString();
  }

  private static String quoted(String text) {
    StringBuilder json = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\') {
        json.append('\\').append(c);
      } else if (c == '\n') {
        json.append("\\n");
      } else if (c < ' ' || c > '~') {
        json.append(String.format("\\u%04x", (int) c));
      } else {
        json.append(c);
      }
    }
    return json.append('"').toString();
  }
}
