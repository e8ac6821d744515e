//! What a template names: keys that it reads, and variables that it does not make itself.

use super::syntax::{Body, Expr, ExprKind, FilterCall, For, Macro, Node, NodeKind, Target};
use std::collections::{BTreeSet, HashSet};

/// Names of a template.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Attributes and quoted texts, among them each key that it can ask a message for by its name.
    pub(super) keys: BTreeSet<String>,
    /// Variables that are read before the template sets them, on some way through it.
    pub(super) variables: BTreeSet<String>,
    /// Whether it has a `{% generation %}` block.
    pub(super) has_generation: bool,
}

/// Names that are set for certain at a place.
#[derive(Debug, Default)]
struct Set {
    names: HashSet<String>,
    /// The same, in the order of setting.
    order: Vec<String>,
}

impl Set {
    fn insert(&mut self, name: &str) {
        if self.names.insert(name.to_owned()) {
            self.order.push(name.to_owned());
        }
    }

    /// Takes back what was set after the first `len` names, and returns it.
    fn back_to(&mut self, len: usize) -> Vec<String> {
        let added = self.order.split_off(len);
        for name in &added {
            self.names.remove(name);
        }
        added
    }

    /// Adds the names of a target.
    fn assign(&mut self, target: &Target) {
        match target {
            Target::Name(name) => self.insert(name),
            Target::Attribute(..) => {}
            Target::Tuple(targets) => targets.iter().for_each(|target| self.assign(target)),
        }
    }
}

impl Names {
    pub(super) fn of(body: &Body) -> Self {
        let mut names = Self::default();
        names.body(body, &mut Set::default());
        names
    }

    /// Statements in their order.
    fn body(&mut self, body: &Body, set: &mut Set) {
        for node in body {
            self.node(node, set);
        }
    }

    /// Calls `inside`; what is set there ends with it.
    fn scoped(&mut self, set: &mut Set, inside: impl FnOnce(&mut Self, &mut Set)) {
        let len = set.order.len();
        inside(self, set);
        set.back_to(len);
    }

    /// Adds the names of a statement, and to `set` those that are set for certain behind it.
    fn node(&mut self, node: &Node, set: &mut Set) {
        match &node.kind {
            NodeKind::Data(_) | NodeKind::Break | NodeKind::Continue | NodeKind::Refused(_) => {}
            NodeKind::Print(value) => self.expression(value, set),
            NodeKind::For(found) => self.loop_over(found, set),
            NodeKind::If(branches, otherwise) => self.branches(branches, otherwise, set),
            NodeKind::Set(target, value) => {
                self.expression(value, set);
                self.attributes(target, set);
                set.assign(target);
            }
            NodeKind::SetBlock(target, filters, body) => {
                self.filters(filters, set);
                self.scoped(set, |names, set| names.body(body, set));
                self.attributes(target, set);
                set.assign(target);
            }
            NodeKind::With(values, body) => {
                values.iter().for_each(|(_, value)| self.expression(value, set));
                self.scoped(set, |names, set| {
                    values.iter().for_each(|(target, _)| set.assign(target));
                    names.body(body, set);
                });
            }
            NodeKind::Macro(found) => {
                set.insert(&found.name);
                self.code(found, set);
            }
            NodeKind::Call(call, caller) => {
                self.expression(call, set);
                self.code(caller, set);
            }
            NodeKind::Filter(filters, body) => {
                self.filters(filters, set);
                self.scoped(set, |names, set| names.body(body, set));
            }
            NodeKind::Generation(body) => {
                self.has_generation = true;
                self.scoped(set, |names, set| names.body(body, set));
            }
            NodeKind::Block(body) => self.scoped(set, |names, set| names.body(body, set)),
        }
    }

    /// A loop's names; what its body or its `else` sets is not set behind it.
    fn loop_over(&mut self, found: &For, set: &mut Set) {
        self.expression(&found.items, set);
        self.scoped(set, |names, set| {
            set.insert("loop");
            set.assign(&found.target);
            if let Some(condition) = &found.condition {
                names.expression(condition, set);
            }
            names.body(&found.body, set);
        });
        self.scoped(set, |names, set| names.body(&found.otherwise, set));
    }

    /// Behind an `if`, what all its branches set is set.
    fn branches(&mut self, branches: &[(Expr, Body)], otherwise: &Body, set: &mut Set) {
        let len = set.order.len();
        self.body(otherwise, set);
        let mut in_all = set.back_to(len);
        for (condition, body) in branches {
            self.expression(condition, set);
            self.body(body, set);
            let added: HashSet<String> = set.back_to(len).into_iter().collect();
            in_all.retain(|name| added.contains(name));
        }
        in_all.iter().for_each(|name| set.insert(name));
    }

    /// A macro's names: its defaults are read with what is set around it, its body with the parameters set as well.
    fn code(&mut self, code: &Macro, set: &mut Set) {
        for default in code.params.iter().filter_map(|(_, default)| default.as_ref()) {
            self.expression(default, set);
        }
        self.scoped(set, |names, set| {
            ["varargs", "kwargs", "caller"].into_iter().for_each(|name| set.insert(name));
            code.params.iter().for_each(|(name, _)| set.insert(name));
            names.body(&code.body, set);
        });
    }

    /// A namespace whose attribute is set is read.
    fn attributes(&mut self, target: &Target, set: &Set) {
        match target {
            Target::Name(_) => {}
            Target::Attribute(name, _) => self.variable(name, set),
            Target::Tuple(targets) => targets.iter().for_each(|target| self.attributes(target, set)),
        }
    }

    fn filters(&mut self, filters: &[FilterCall], set: &Set) {
        for part in filters.iter().flat_map(|filter| filter.arguments.expressions()) {
            self.expression(part, set);
        }
    }

    fn variable(&mut self, name: &str, set: &Set) {
        if !set.names.contains(name) {
            self.variables.insert(name.to_owned());
        }
    }

    /// Adds the variables of an expression that are not in `set`, and its attributes and quoted texts as keys.
    fn expression(&mut self, expr: &Expr, set: &Set) {
        match &*expr.kind {
            ExprKind::Name(name) => self.variable(name, set),
            ExprKind::Attribute(_, name) => _ = self.keys.insert(name.clone()),
            // A filter takes `map(attribute="function.name")`.
            ExprKind::Text(text) => {
                self.keys.insert(text.clone());
                self.keys.extend(text.split('.').map(str::to_owned));
            }
            _ => {}
        }
        for part in expr.kind.parts() {
            self.expression(part, set);
        }
    }
}
