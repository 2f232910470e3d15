package io.ncclffm.core.internal;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.internal.ProcessMaps.Mapping;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Set;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Which file an address belongs to, and which files are mapped. */
class ProcessMapsTest {
  private static final ProcessMaps MAPS =
      new ProcessMaps(
          List.of(
              new Mapping(0x1000, 0x2000, "/a/libnccl.so.2"),
              new Mapping(0x2000, 0x3000, "/b/libnccl.so.2"),
              new Mapping(0x4000, 0x5000, "/a/libnccl.so.2"),
              new Mapping(0x5000, 0x6000, "/libnccl.so.2/other"),
              // Above Long.MAX_VALUE, as the last page of Linux's address space is.
              new Mapping(0xffffffffff600000L, 0xffffffffff601000L, "/high")));

  @Test
  void addressBelongsToTheMappingThatHoldsIt() {
    assertNull(MAPS.fileAt(0xfff));
    assertEquals("/a/libnccl.so.2", MAPS.fileAt(0x1000));
    assertEquals("/a/libnccl.so.2", MAPS.fileAt(0x1fff));
    assertEquals("/b/libnccl.so.2", MAPS.fileAt(0x2000));
    assertNull(MAPS.fileAt(0x3000));
    assertEquals("/high", MAPS.fileAt(0xffffffffff600fffL));
    assertNull(MAPS.fileAt(-1));
  }

  @Test
  void filesAreFoundByTheBeginningOfTheirNameEachOnce() {
    assertEquals(Set.of("/a/libnccl.so.2", "/b/libnccl.so.2"), MAPS.filesNamed("libnccl.so"));
    assertEquals(Set.of("/libnccl.so.2/other"), MAPS.filesNamed("oth"));
    assertEquals(Set.of(), MAPS.filesNamed("libcudart.so"));
  }

  @Test
  void mappedFileWithBlanksInItsNameIsRead(@TempDir Path folder) throws Exception {
    Path file = folder.resolve("lib with  blanks.so");
    Files.write(file, new byte[4096]);
    try (FileChannel channel = FileChannel.open(file);
        Arena arena = Arena.ofConfined()) {
      MemorySegment mapped = channel.map(FileChannel.MapMode.READ_ONLY, 0, 4096, arena);
      ProcessMaps maps = ProcessMaps.read();
      assertEquals(file.toRealPath().toString(), maps.fileAt(mapped.address()));
      assertEquals(Set.of(file.toRealPath().toString()), maps.filesNamed("lib with"));
    }
  }

  @Test
  void thisProcessHasALibcAndKnowsWhereItIs() {
    ProcessMaps maps = ProcessMaps.read();
    assertTrue(maps.mappings().size() > 10, maps.toString());
    MemorySegment free =
        java.lang.foreign.Linker.nativeLinker().defaultLookup().findOrThrow("free");
    String file = maps.fileAt(free.address());
    assertTrue(file != null && file.contains("libc"), file);
  }
}
