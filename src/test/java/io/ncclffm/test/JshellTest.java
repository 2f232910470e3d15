package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import jdk.jshell.EvalException;
import jdk.jshell.ExpressionSnippet;
import jdk.jshell.JShell;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.VarSnippet;
import org.junit.jupiter.api.Test;

/** The transcript of docs/jshell.md, typed into a jshell of this process: it answers as it says. */
class JshellTest {
  private static final String PROMPT = "jshell> ";
  private static final String CONTINUED = "   ...> ";

  private record Step(String input, String answer) {}

  private static List<Step> transcript(Path document) throws IOException {
    List<Step> steps = new ArrayList<>();
    boolean inside = false;
    StringBuilder input = new StringBuilder();
    StringBuilder answer = new StringBuilder();
    for (String line : Files.readAllLines(document)) {
      if ((line.startsWith(PROMPT) || line.startsWith("```")) && !input.isEmpty()) {
        steps.add(new Step(input.toString(), answer.toString().strip()));
        input.setLength(0);
        answer.setLength(0);
      }
      if (line.startsWith("```")) {
        inside = line.equals("```jshell");
      } else if (inside && line.startsWith(PROMPT)) {
        input.append(line.substring(PROMPT.length()));
      } else if (inside && line.startsWith(CONTINUED)) {
        input.append('\n').append(line.substring(CONTINUED.length()));
      } else if (inside) {
        answer.append(line).append('\n');
      }
    }
    return steps;
  }

  @Test
  void theTranscriptIsTrue() throws Exception {
    assumeTrue(ModuleLayer.boot().findModule("jdk.jshell").isPresent(), "a runtime without jshell");
    String file = System.getProperty("ncclffm.test.transcript");
    assumeTrue(file != null, "no -Dncclffm.test.transcript=docs/jshell.md");
    List<Step> steps = transcript(Path.of(file));
    assertTrue(steps.size() > 10, steps::toString);
    TestRanks.prepare();
    if (!TestRanks.onCpu()) {
      NvrtcHere.assumePresent();
    }
    Typist.type(steps, Path.of(file).resolveSibling("../scripts/jshell-startup.jsh"));
  }

  /** Apart, because a runtime without jshell cannot load it. */
  private static final class Typist {
    static void type(List<Step> steps, Path startup) throws IOException {
      // In this process, whose class path and libraries it shares.
      try (JShell shell = JShell.builder().executionEngine("local").build()) {
        shell.addToClasspath(System.getProperty("java.class.path"));
        for (String line : Files.readAllLines(startup)) {
          answer(shell, line);
        }
        for (Step step : steps) {
          boolean runsCuda = step.input.contains("KernelModule");
          if (runsCuda && TestRanks.onCpu()) {
            String refusal = answer(shell, step.input);
            assertTrue(refusal.contains("the CPU backend runs no CUDA code"), refusal);
            answer(shell, "stream.close(); x.close()");
            return;
          }
          assertEquals(step.answer, answer(shell, step.input), step.input);
        }
        answer(shell, "stream.close(); x.close(); kernels.close()");
      }
    }

    /** What jshell prints, but for the dots and names of temporary variables. */
    private static String answer(JShell shell, String input) {
      List<String> answers = new ArrayList<>();
      SourceCodeAnalysis analysis = shell.sourceCodeAnalysis();
      String rest = input;
      while (!rest.isBlank()) {
        SourceCodeAnalysis.CompletionInfo info = analysis.analyzeCompletion(rest);
        assertTrue(info.completeness().isComplete(), "not complete: " + rest);
        for (SnippetEvent event : shell.eval(info.source())) {
          answers.add(answer(shell, event));
        }
        rest = info.remaining();
      }
      return String.join("\n", answers).strip();
    }

    private static String answer(JShell shell, SnippetEvent event) {
      Snippet snippet = event.snippet();
      if (event.exception() instanceof EvalException e) {
        return e.getExceptionClassName() + ": " + e.getMessage();
      }
      if (event.status() != Snippet.Status.VALID) {
        return event.status()
            + ": "
            + shell.diagnostics(snippet).map(d -> d.getMessage(null)).toList();
      }
      if (snippet instanceof VarSnippet variable) {
        return variable.name() + " ==> " + event.value();
      }
      if (snippet instanceof ExpressionSnippet expression) {
        return expression.name() + " ==> " + event.value();
      }
      return "";
    }
  }
}
