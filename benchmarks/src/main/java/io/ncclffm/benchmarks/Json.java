package io.ncclffm.benchmarks;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** As much JSON as a result file needs: objects, arrays, strings and numbers. */
final class Json {
  private final String text;
  private int at;

  private Json(String text) {
    this.text = text;
  }

  /** Maps, lists, strings and doubles. */
  static Object parse(String text) {
    Json json = new Json(text);
    Object value = json.value();
    json.space();
    if (json.at != text.length()) {
      throw json.wrong("the end");
    }
    return value;
  }

  static String quote(String text) {
    StringBuilder quoted = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\') {
        quoted.append('\\').append(c);
      } else if (c < ' ') {
        quoted.append(String.format("\\u%04x", (int) c));
      } else {
        quoted.append(c);
      }
    }
    return quoted.append('"').toString();
  }

  private IllegalArgumentException wrong(String expected) {
    return new IllegalArgumentException(
        "not the JSON of a result file: at character " + at + " there should be " + expected);
  }

  private void space() {
    while (at < text.length() && Character.isWhitespace(text.charAt(at))) {
      at++;
    }
  }

  private boolean skip(char c) {
    space();
    if (at < text.length() && text.charAt(at) == c) {
      at++;
      return true;
    }
    return false;
  }

  private void expect(char c) {
    if (!skip(c)) {
      throw wrong("'" + c + "'");
    }
  }

  private Object value() {
    if (skip('{')) {
      Map<String, Object> members = new LinkedHashMap<>();
      if (!skip('}')) {
        do {
          expect('"');
          String name = string();
          expect(':');
          members.put(name, value());
        } while (skip(','));
        expect('}');
      }
      return members;
    }
    if (skip('[')) {
      List<Object> elements = new ArrayList<>();
      if (!skip(']')) {
        do {
          elements.add(value());
        } while (skip(','));
        expect(']');
      }
      return elements;
    }
    return skip('"') ? string() : number();
  }

  private String string() {
    StringBuilder string = new StringBuilder();
    while (at < text.length() && text.charAt(at) != '"') {
      char c = text.charAt(at++);
      if (c == '\\' && at < text.length()) {
        c = text.charAt(at++);
        if (c == 'u' && at + 4 <= text.length()) {
          c = (char) Integer.parseInt(text, at, at + 4, 16);
          at += 4;
        }
      }
      string.append(c);
    }
    expect('"');
    return string.toString();
  }

  private Double number() {
    int from = at;
    while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) {
      at++;
    }
    try {
      return Double.valueOf(text.substring(from, at));
    } catch (NumberFormatException e) {
      throw wrong("a value");
    }
  }
}
