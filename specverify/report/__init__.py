"""A certificate as people read it: terminal, HTML, JUnit, Markdown. Rendering computes nothing."""
