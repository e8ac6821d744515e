//! Assembles the complete text of a kernel: defines, then the file with its includes pasted in.
//!
//! NVRTC gets this single string and no include folder. The hash of the complete text is the key under which the
//! compiled kernel is cached, so a change in a kernel or in a file that it includes always compiles again.
use crate::KernelError;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_128;

include!(concat!(env!("OUT_DIR"), "/kernel_files.rs"));

/// A kernel's complete text, ready for the compiler.
#[derive(Debug, PartialEq, Eq)]
pub struct KernelText {
    /// Defines, then the file with its includes pasted in.
    pub text: String,
    /// xxh3 hash of `text`.
    pub hash: u128,
}

impl KernelText {
    /// Names of the embedded files, relative to `kernels/`, sorted.
    pub fn files() -> impl Iterator<Item = &'static str> {
        KERNEL_FILES.iter().map(|(name, _)| *name)
    }

    /// Text of an embedded file, without its includes.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when the file did not exist at compile time.
    pub fn of_file(name: &str) -> Result<&'static str, KernelError> {
        KERNEL_FILES.binary_search_by_key(&name, |(known, _)| known).map(|at| KERNEL_FILES[at].1).map_err(|_| {
            let words = "no such file among the kernels built into this program\n  hint: kernels/";
            KernelError::refused(name, format!("{words}{name} must exist when sieve-gpu is compiled"))
        })
    }
}

/// Assembles the text of `file`. Results are cached, since a training step needs the same few texts thousands of times.
///
/// # Errors
/// An unknown file, or an include that cannot be resolved.
pub(crate) fn assemble_file(file: &str, defines: &[(&'static str, String)]) -> Result<Arc<KernelText>, KernelError> {
    static ASSEMBLED: LazyLock<Mutex<HashMap<String, Arc<KernelText>>>> = LazyLock::new(Mutex::default);
    let mut key = file.to_owned();
    for (name, value) in defines {
        // Infallible for a String; the newline keeps `A=1 B` and `A`, `1 B` apart.
        let _ = write!(key, "\n{name}={value}");
    }
    let mut assembled = ASSEMBLED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = assembled.get(&key) {
        return Ok(text.clone());
    }
    let text = Arc::new(assemble_text(file, KernelText::of_file(file)?, defines)?);
    assembled.insert(key, text.clone());
    Ok(text)
}

/// [`assemble_file`] for a text that is not embedded; its includes are.
///
/// # Errors
/// An include that cannot be resolved.
pub(crate) fn assemble_text(
    file: &str,
    source: &str,
    defines: &[(&'static str, String)],
) -> Result<KernelText, KernelError> {
    let mut text = String::with_capacity(source.len() + 4096);
    for (name, value) in defines {
        let _ = writeln!(text, "#define {name} {value}");
    }
    paste(file, source, &mut vec![file.to_owned()], &mut text)?;
    let hash = xxh3_128(text.as_bytes());
    Ok(KernelText { text, hash })
}

/// Appends `source` line by line to `out`. Each `#include "..."` is replaced by its file, unless the file is already in
/// `seen`. `#line` directives make the compiler's messages name the real files and lines.
fn paste(file: &str, source: &str, seen: &mut Vec<String>, out: &mut String) -> Result<(), KernelError> {
    let _ = writeln!(out, "#line 1 \"kernels/{file}\"");
    let mut depth = 0usize;
    for (index, line) in source.lines().enumerate() {
        let number = index + 1;
        let directive = line.trim_start().strip_prefix('#').map(str::trim_start);
        match directive {
            Some(d) if d.starts_with("if") => depth += 1,
            Some(d) if d.starts_with("endif") => depth = depth.saturating_sub(1),
            // Every file is pasted once, so the pragma is not needed; NVRTC would warn about it in a main file.
            Some(d) if d.starts_with("pragma once") => {
                out.push('\n');
                continue;
            }
            Some(d) if d.starts_with("include") => {
                if let Some(name) = quoted(d) {
                    if depth > 0 {
                        let words =
                            format!("include \"{name}\" is inside #if; includes are pasted once, so put it above");
                        return Err(KernelError::refused(&format!("{file}, line {number}"), words));
                    }
                    let (name, text) = resolve(file, name, number)?;
                    if !seen.contains(&name) {
                        seen.push(name.clone());
                        paste(&name, text, seen, out)?;
                    }
                    let _ = writeln!(out, "#line {} \"kernels/{file}\"", number + 1);
                    continue;
                }
            }
            _ => {}
        }
        out.push_str(line);
        out.push('\n');
    }
    Ok(())
}

/// The name in `include "name"`; `None` for `include <name>`, which is left to the compiler.
fn quoted(directive: &str) -> Option<&str> {
    let rest = directive.strip_prefix("include")?.trim_start().strip_prefix('"')?;
    rest.split_once('"').map(|(name, _)| name)
}

/// Finds an included file like nvcc with `-I kernels`: first in the folder of the including file, then in `kernels/`.
fn resolve(file: &str, name: &str, line: usize) -> Result<(String, &'static str), KernelError> {
    let beside = match file.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{name}"),
        None => name.to_owned(),
    };
    for candidate in [beside, name.to_owned()] {
        if let Ok(text) = KernelText::of_file(&candidate) {
            return Ok((candidate, text));
        }
    }
    let words = format!("include \"{name}\" names no file below kernels/");
    Err(KernelError::refused(&format!("{file}, line {line}"), words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_assembles_and_has_no_include_left() {
        let kernels: Vec<_> = KernelText::files().filter(|f| f.ends_with(".cu")).collect();
        assert!(!kernels.is_empty(), "no kernel is built in");
        for file in kernels {
            let text = assemble_file(file, &[("HEAD_DIM", "64".into())]).expect(file);
            let left = text.text.lines().find(|l| l.trim_start().starts_with("#include \""));
            assert_eq!(left, None, "{file}");
            assert!(text.text.starts_with("#define HEAD_DIM 64\n"));
        }
    }

    #[test]
    fn another_text_or_define_has_another_hash() {
        let base = assemble_text("a.cu", "x", &[("A", "1".into())]).expect("no include");
        let other_text = assemble_text("a.cu", "y", &[("A", "1".into())]).expect("no include");
        let other_define = assemble_text("a.cu", "x", &[("A", "2".into())]).expect("no include");
        assert_ne!(base.hash, other_text.hash);
        assert_ne!(base.hash, other_define.hash);
        assert_eq!(base, assemble_text("a.cu", "x", &[("A", "1".into())]).expect("no include"));
    }

    #[test]
    fn an_include_is_pasted_once_and_lines_are_kept() {
        let header = KernelText::files().find(|f| f.ends_with(".cuh")).expect("a shared header exists");
        let source = format!("#include \"{header}\"\n#include \"{header}\"\nlast\n");
        let text = assemble_text("a.cu", &source, &[]).expect("header exists").text;
        assert_eq!(text.matches(&format!("#line 1 \"kernels/{header}\"")).count(), 1);
        assert!(text.ends_with("#line 3 \"kernels/a.cu\"\nlast\n"), "{text}");
    }

    #[test]
    fn a_missing_include_names_file_and_line() {
        let error = assemble_text("a.cu", "\n#include \"nowhere.cuh\"\n", &[]).expect_err("no such file");
        assert!(error.to_string().starts_with("a.cu, line 2: include \"nowhere.cuh\""), "{error}");
        let inside = assemble_text("a.cu", "#if 1\n#include \"nowhere.cuh\"\n#endif\n", &[]).expect_err("inside #if");
        assert!(inside.to_string().contains("inside #if"), "{inside}");
    }
}
