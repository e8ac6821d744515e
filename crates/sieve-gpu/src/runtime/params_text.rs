//! Parses the params structs of the kernels and generates Rust structs. `build.rs` runs this file; the crate itself
//! contains it in tests alone.
use std::collections::BTreeMap;
use std::fmt::Write;

/// A params struct in a kernel's text.
#[derive(Debug, PartialEq, Eq)]
struct ParamsStruct {
    /// The base struct, whose fields come first.
    base: Option<String>,
    /// Names of the struct's own fields, in order.
    words: Vec<String>,
}

/// Rust text for the structs and entry points of all files, given as (name, text).
///
/// # Errors
/// A struct with fields other than `u64`, two structs of one name, or an entry point without a struct.
pub(crate) fn rust_of(files: &[(String, String)]) -> Result<String, String> {
    let mut structs = BTreeMap::new();
    let mut entries = BTreeMap::new();
    for (file, text) in files {
        let code = without_comments(text);
        for (name, found) in structs_in(&code).map_err(|e| format!("{file}: {e}"))? {
            if structs.insert(name.clone(), found).is_some() {
                return Err(format!("{file}: {name} is declared twice; share a header"));
            }
        }
        entries.extend(entry_in(&code).map_err(|e| format!("{file}: {e}"))?);
    }
    let mut rust = String::new();
    for (name, ParamsStruct { base, words }) in &structs {
        if let Some(base) = base.as_ref().filter(|base| !structs.contains_key(*base)) {
            return Err(format!("{name}: its base {base} is nowhere"));
        }
        let (base_field, append_base) = match base {
            Some(base) => (format!("pub(crate) base: {base},"), "self.base.append(words);"),
            None => (String::new(), ""),
        };
        let fields: String = words.iter().map(|w| format!("pub(crate) {w}: Word,")).collect();
        let append_fields: String = words.iter().map(|w| format!("words.push(self.{w}.0);")).collect();
        // Writing to a String cannot fail.
        let _ = write!(
            rust,
            "#[derive(Debug, Clone, Copy)]\npub(crate) struct {name} {{ {base_field} {fields} }}\n\
             impl Params for {name} {{\n    const NAME: &'static str = {name:?};\n    \
             fn append(&self, words: &mut Vec<u64>) {{ {append_base} {append_fields} }}\n}}\n"
        );
    }
    let _ = writeln!(rust, "static ENTRY_PARAMS: &[(&str, &str)] = &[");
    for (entry, name) in &entries {
        if !structs.contains_key(name) {
            return Err(format!("{entry}: its params {name} are declared nowhere"));
        }
        let _ = writeln!(rust, "    ({entry:?}, {name:?}),");
    }
    rust.push_str("];\n");
    Ok(rust)
}

fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
    lines.collect::<Vec<_>>().join("\n")
}

/// Every `struct XParams { u64 a, b; };` or `struct XParams : YParams { .. };`.
fn structs_in(code: &str) -> Result<Vec<(String, ParamsStruct)>, String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("struct ") {
        let Some((head, rest)) = code[at + "struct ".len()..].split_once('{') else {
            continue;
        };
        let (name, base) = match head.split_once(':') {
            Some((name, base)) => (name.trim(), Some(base.trim().to_owned())),
            None => (head.trim(), None),
        };
        if !name.ends_with("Params") || name.contains(char::is_whitespace) {
            continue;
        }
        let body = rest.split('}').next().unwrap_or("");
        let mut words = Vec::new();
        for line in body.split(';').map(str::trim).filter(|line| !line.is_empty()) {
            let Some(names) = line.strip_prefix("u64 ") else {
                return Err(format!("{name} holds u64 words only, not `{line}`"));
            };
            words.extend(names.split(',').map(|word| word.trim().to_owned()));
        }
        found.push((name.to_owned(), ParamsStruct { base, words }));
    }
    Ok(found)
}

/// The entry point of a kernel's file, and the name of its params struct; `None` for a header.
fn entry_in(code: &str) -> Result<Option<(String, String)>, String> {
    let Some((_, entry)) = code.split_once("extern \"C\" __global__") else {
        return Ok(None);
    };
    if entry.contains("extern \"C\" __global__") {
        return Err("a file has one entry point".to_owned());
    }
    let head = entry.split('{').next().unwrap_or("");
    let words: Vec<&str> = head.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let params = words.iter().find(|word| word.ends_with("Params"));
    match (entry_name(head), params) {
        (Some(name), Some(params)) => Ok(Some((name, (*params).to_owned()))),
        _ => Err("its entry point takes no params struct".to_owned()),
    }
}

/// `name` in `void __launch_bounds__(..) name(..)`: the last word before a parenthesis that is in no other parentheses.
fn entry_name(head: &str) -> Option<String> {
    let mut depth = 0;
    let mut name = None;
    for (at, c) in head.char_indices() {
        match c {
            '(' => {
                if depth == 0 {
                    name = head[..at].trim_end().rsplit(char::is_whitespace).next();
                }
                depth += 1;
            }
            ')' => depth -= 1,
            _ => {}
        }
    }
    name.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "
        // struct OldParams { u64 gone; };
        struct Tile { int rows; };
        struct FirstParams { u64 batch, seq_len; };  // sizes
        struct AParams : FirstParams {
          u64 window;   // keys, itself included
          u64 scale;
        };
        extern \"C\" __global__ void __launch_bounds__(min(A, 2), 1)
        a(const bf16* x, const __grid_constant__ AParams params) { call(x); }
    ";

    fn rust(text: &str) -> Result<String, String> {
        rust_of(&[("a.cu".to_owned(), text.to_owned())])
    }

    #[test]
    fn fields_keep_their_names_and_order() {
        let found = structs_in(&without_comments(KERNEL)).expect("well formed");
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["FirstParams", "AParams"]);
        assert_eq!(found[0].1.words, ["batch", "seq_len"]);
        assert_eq!(found[1].1.words, ["window", "scale"]);
        assert_eq!(found[1].1.base.as_deref(), Some("FirstParams"));
    }

    #[test]
    fn an_entry_point_is_found_with_its_struct() {
        let text = rust(KERNEL).expect("well formed");
        assert!(text.contains("(\"a\", \"AParams\")"), "{text}");
    }

    #[test]
    fn other_fields_than_u64_and_unknown_structs_are_refused() {
        assert!(rust(&KERNEL.replace("u64 window", "float window")).is_err());
        assert!(rust(&KERNEL.replace(": FirstParams", ": NoParams")).is_err());
        assert!(rust(&KERNEL.replace("AParams params", "u64 n")).is_err());
        assert!(rust(&format!("{KERNEL}struct AParams {{ u64 x; }};")).is_err());
    }
}
