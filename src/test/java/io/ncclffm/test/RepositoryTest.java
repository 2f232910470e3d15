package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.jar.JarFile;
import java.util.stream.Stream;
import javax.xml.parsers.DocumentBuilderFactory;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.w3c.dom.Element;
import org.w3c.dom.Node;

/**
 * What the modules give to a repository: complete, as Maven Central asks for it, and nothing else.
 */
class RepositoryTest {
  private static final String PARENT = "nccl-ffm-parent";
  private static final List<String> MODULES =
      List.of("nccl-ffm-native", "nccl-ffm-core", "nccl-ffm-lsa", "nccl-ffm-device");

  /** Those that a module has from its parent. */
  private static final List<String> INHERITED =
      List.of("url", "licenses", "developers", "scm", "groupId", "version");

  private Path group;

  @BeforeEach
  void find() {
    group = BuildRepository.assumeInstalled().resolve("io/ncclffm");
  }

  /** The one file of a module that ends so. */
  private Path file(String module, String end) throws IOException {
    try (Stream<Path> files =
        Files.list(group.resolve(module).resolve(BuildRepository.version()))) {
      List<Path> found = files.filter(f -> f.toString().endsWith(end)).toList();
      List<Path> main = new ArrayList<>(found);
      main.removeIf(
          f -> !f.getFileName().toString().matches(module + "-[0-9.]+(-[0-9.A-Z-]+)?" + end));
      assertEquals(1, main.size(), () -> module + ", " + end + ": " + found);
      return main.get(0);
    }
  }

  private Element pom(String module) throws Exception {
    return DocumentBuilderFactory.newDefaultInstance()
        .newDocumentBuilder()
        .parse(file(module, ".pom").toFile())
        .getDocumentElement();
  }

  private static @Nullable Element child(Element element, String name) {
    for (Node n = element.getFirstChild(); n != null; n = n.getNextSibling()) {
      if (n instanceof Element e && e.getTagName().equals(name)) {
        return e;
      }
    }
    return null;
  }

  private static void assertHas(Element pom, String... path) {
    Element at = pom;
    for (String name : path) {
      @Nullable Element next = child(at, name);
      assertNotNull(next, () -> String.join("/", path) + " is missing");
      at = next;
    }
    assertFalse(at.getTextContent().isBlank(), () -> String.join("/", path) + " is empty");
  }

  @Test
  void onlyWhatUsersTake() throws IOException {
    Set<String> deployed = new TreeSet<>();
    try (Stream<Path> folders = Files.list(group)) {
      folders.forEach(f -> deployed.add(f.getFileName().toString()));
    }
    Set<String> wanted = new TreeSet<>(MODULES);
    wanted.add(PARENT);
    assertEquals(wanted, deployed);
  }

  @Test
  void pomsSayWhatMavenCentralAsksFor() throws Exception {
    Element parent = pom(PARENT);
    assertHas(parent, "name");
    assertHas(parent, "description");
    assertHas(parent, "url");
    assertHas(parent, "licenses", "license", "name");
    assertHas(parent, "licenses", "license", "url");
    assertHas(parent, "developers", "developer", "name");
    assertHas(parent, "developers", "developer", "organization");
    assertHas(parent, "scm", "connection");
    assertHas(parent, "scm", "developerConnection");
    assertHas(parent, "scm", "url");
    for (String module : MODULES) {
      Element pom = pom(module);
      assertHas(pom, "parent", "version");
      assertHas(pom, "name");
      assertHas(pom, "description");
      INHERITED.forEach(name -> assertEquals(null, child(pom, name), module + ": " + name));
    }
  }

  /** Importing the parent settles the versions of this project, and of nothing else. */
  @Test
  void parentIsTheBillOfMaterials() throws Exception {
    Element managed = child(pom(PARENT), "dependencyManagement");
    assertNotNull(managed);
    Set<String> artifacts = new TreeSet<>();
    var names = managed.getElementsByTagName("artifactId");
    for (int i = 0; i < names.getLength(); i++) {
      artifacts.add(names.item(i).getTextContent());
    }
    assertEquals(new TreeSet<>(MODULES), artifacts);
  }

  @Test
  void jarsAreModulesWithNativeLibraries() throws Exception {
    for (String module : MODULES) {
      try (JarFile jar = new JarFile(file(module, ".jar").toFile())) {
        assertNotNull(jar.getEntry("module-info.class"), module);
      }
    }
    try (JarFile jar = new JarFile(file("nccl-ffm-native", ".jar").toFile())) {
      String folder = "META-INF/ncclffm/" + CpuLibrary.platform() + "/";
      assertNotNull(jar.getEntry(folder + "libncclffm_cpu.so"));
      assertNotNull(jar.getEntry("META-INF/ncclffm/include/ncclffm/device.h"));
    }
  }

  /** Only with the profile release: they take their time. */
  @Test
  void sourcesAndDocumentation() throws Exception {
    for (String module : MODULES) {
      for (String classifier : BuildRepository.classifiers()) {
        String source = classifier.equals("sources") ? "module-info.java" : "META-INF/MANIFEST.MF";
        try (JarFile jar = new JarFile(file(module, "-" + classifier + ".jar").toFile())) {
          assertNotNull(jar.getEntry(source), module + ", " + classifier);
          assertTrue(jar.size() > 1, module + ", " + classifier);
        }
      }
    }
  }
}
