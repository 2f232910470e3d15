package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.regex.MatchResult;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/**
 * The site of {@code mvn -Psite}: the guides as javadoc is given them, and what it makes of them.
 */
class SiteTest {
  private static final Pattern MARKDOWN_LINK = Pattern.compile("\\]\\(([^):\\s]+)\\)");
  private static final Pattern HTML_LINK = Pattern.compile("(?:href|src)=\"([^\":]+)\"");

  private Path tree;

  @BeforeEach
  void find() {
    String property = System.getProperty("ncclffm.test.tree");
    assumeTrue(property != null, "no -Dncclffm.test.tree=FOLDER");
    tree = Path.of(property);
  }

  /**
   * Links of a file that lead to no file or anchor.
   *
   * @param page how a file's name ends that a link calls .html
   */
  private static List<String> brokenLinks(Path file, Pattern links, String page)
      throws IOException {
    String text = Files.readString(file).replaceAll("(?ms)^```.*?^```$", "");
    List<String> broken = new ArrayList<>();
    for (MatchResult link : links.matcher(text).results().toList()) {
      String[] parts = link.group(1).split("#", 2);
      Path target = parts[0].isEmpty() ? file : file.resolveSibling(parts[0]).normalize();
      if (target.toString().endsWith(".html")) {
        target = Path.of(target.toString().replaceFirst("\\.html$", page));
      }
      boolean found =
          !parts[0].endsWith(".md")
              && Files.exists(target)
              && (parts.length == 1
                  || Files.readString(target).contains("id=\"" + parts[1] + "\""));
      if (!found) {
        broken.add(file + ": " + link.group(1));
      }
    }
    return broken;
  }

  private static List<Path> files(Path folder, String ending) throws IOException {
    try (Stream<Path> files = Files.walk(folder)) {
      return files.filter(file -> file.toString().endsWith(ending)).toList();
    }
  }

  @Test
  void guidesLeadToEachOther(@TempDir Path folder) throws Exception {
    Path log = folder.resolve("log");
    Path guides = folder.resolve("guides");
    String file = tree.resolve("scripts/site-guides.sh").toString();
    ProcessBuilder bash = new ProcessBuilder("bash", file, guides.toString());
    Process script = bash.redirectErrorStream(true).redirectOutput(log.toFile()).start();
    boolean ended = script.waitFor(1, TimeUnit.MINUTES);
    script.destroyForcibly();
    String output = Files.readString(log);
    assertTrue(ended, output);
    assertEquals(0, script.exitValue(), output);
    List<String> broken = new ArrayList<>();
    for (Path guide : files(guides.resolve("doc-files"), ".md")) {
      broken.addAll(brokenLinks(guide, MARKDOWN_LINK, ".md"));
    }
    assertEquals(List.of(), broken);
  }

  @Test
  void pagesLeadToEachOther() throws IOException {
    Path site = tree.resolve("target/site");
    assumeTrue(Files.exists(site), "mvn -Psite comes first");
    List<Path> pages = new ArrayList<>(files(site.resolve("io.ncclffm.core/doc-files"), ".html"));
    pages.add(site.resolve("index.html"));
    List<String> broken = new ArrayList<>();
    for (Path page : pages) {
      broken.addAll(brokenLinks(page, HTML_LINK, ".html"));
    }
    assertEquals(List.of(), broken);
    for (String guide : List.of("README", "CONTRIBUTING", "docs/index", "docs/model")) {
      assertTrue(
          pages.contains(site.resolve("io.ncclffm.core/doc-files/" + guide + ".html")), guide);
    }
  }
}
