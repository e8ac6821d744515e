//! Generates two Rust files from `kernels/`, which is a link to the folder of that name at the root:
//!
//! - `kernel_files.rs`: the table `KERNEL_FILES` with the path below `kernels/` and the text of every file;
//! - `kernel_params.rs`: a Rust struct for each `struct ..Params` of the kernels, and the table `ENTRY_PARAMS` with
//!   each entry point and the name of its struct.
#![allow(clippy::disallowed_methods, reason = "paths of this repository")]
#[path = "src/runtime/params_text.rs"]
mod params_text;

use std::path::{Path, PathBuf};
use std::{env, fs};

/// The texts are those of this moment: a file that changes in between takes part in the next build alone.
fn main() {
    let manifest = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let kernels = PathBuf::from(manifest).join("kernels");
    println!("cargo:rerun-if-changed=src/runtime/params_text.rs");
    let mut files = Vec::new();
    collect(&kernels, &kernels, &mut files);
    files.sort();
    // The table holds the texts themselves: `include_str!` would read the files again when the crate is compiled, and
    // a file edited in between would no longer fit the params structs below.
    let mut table = String::from("static KERNEL_FILES: &[(&str, &str)] = &[\n");
    for (name, text) in &files {
        table.push_str(&format!("    ({name:?}, {text:?}),\n"));
    }
    table.push_str("];\n");
    fs::write(out.join("kernel_files.rs"), table).expect("OUT_DIR is writable");
    let params = params_text::rust_of(&files).unwrap_or_else(|e| panic!("kernels/{e}"));
    fs::write(out.join("kernel_params.rs"), params).expect("OUT_DIR is writable");
}

/// Appends (name, text) of all `.cu` and `.cuh` files below `folder`. A name is the path relative to `root`, with
/// forward slashes.
fn collect(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
    println!("cargo:rerun-if-changed={}", folder.display());
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries {
        let path = entry.expect("the folder is readable").path();
        if path.is_dir() {
            collect(root, &path, files);
        } else if path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
            println!("cargo:rerun-if-changed={}", path.display());
            let relative = path.strip_prefix(root).expect("found below root");
            let name = relative.to_string_lossy().replace('\\', "/");
            let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            files.push((name, text));
        }
    }
}
