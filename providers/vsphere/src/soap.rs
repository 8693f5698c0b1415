//! Writes requests of the vSphere API as SOAP 1.1, and reads its answers. Pure; bounded by the size of an answer.

use peerpod_provider_rest::Said;
use roxmltree::{Document, Node, ParsingOptions};

/// Namespace of types in XML.
const XSI: &str = "http://www.w3.org/2001/XMLSchema-instance";
/// Most nodes of an answer. A page of VMs with a thousand variables each has fewer.
const MAX_NODES: u32 = 1_000_000;
/// Longest reference, in bytes.
const MAX_REFERENCE: usize = 256;

/// Reference to an object of the vCenter: its type and its id, like `VirtualMachine` and `vm-51`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Moref {
    pub kind: String,
    pub id: String,
}

impl Moref {
    /// Reads a reference of an answer.
    pub(crate) fn read(node: Node<'_, '_>) -> Option<Moref> {
        let (kind, id) = (node.attribute("type")?, node.text()?.trim());
        let fits = !id.is_empty() && id.len() <= MAX_REFERENCE && kind.len() <= MAX_REFERENCE;
        fits.then(|| Moref { kind: kind.to_owned(), id: id.to_owned() })
    }

    /// Returns the reference as an element.
    pub(crate) fn xml(&self, tag: &str) -> String {
        format!("<{tag} type=\"{}\">{}</{tag}>", escape(&self.kind), escape(&self.id))
    }
}

impl std::fmt::Display for Moref {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.id)
    }
}

/// Call of a method on an object.
#[derive(Debug, Clone)]
pub(crate) struct Method {
    pub name: &'static str,
    pub this: Moref,
    /// Arguments as XML, in the order of the API.
    pub arguments: String,
}

impl Method {
    /// Returns the envelope with the call.
    pub(crate) fn envelope(&self) -> String {
        let Method { name, this, arguments } = self;
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<soapenv:Envelope \
             xmlns:soapenv=\"http://schemas.xmlsoap.org/soap/envelope/\" xmlns:xsi=\"{XSI}\" \
             xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\"><soapenv:Body><{name} xmlns=\"urn:vim25\">{}{arguments}\
             </{name}></soapenv:Body></soapenv:Envelope>",
            this.xml("_this")
        )
    }
}

/// Returns an element with a text.
pub(crate) fn text(tag: &str, text: &str) -> String {
    format!("<{tag}>{}</{tag}>", escape(text))
}

/// Returns an element with others.
pub(crate) fn element(tag: &str, inner: &str) -> String {
    format!("<{tag}>{inner}</{tag}>")
}

/// Returns an element of a type of the API, with others.
pub(crate) fn typed(tag: &str, kind: &str, inner: &str) -> String {
    format!("<{tag} xsi:type=\"{kind}\">{inner}</{tag}>")
}

/// Returns a variable of a VM's `extraConfig`.
pub(crate) fn option(key: &str, value: &str) -> String {
    let value = format!("<value xsi:type=\"xsd:string\">{}</value>", escape(value));
    typed("extraConfig", "OptionValue", &(text("key", key) + &value))
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            // XML cannot contain these characters.
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Reads an answer: the result of the method by `read`, or the fault. `None`: the answer is none of a vCenter's.
pub(crate) fn answer<T>(
    body: &[u8],
    read: impl FnOnce(Node<'_, '_>) -> Option<T>,
) -> Option<Result<T, Said>> {
    let text = std::str::from_utf8(body).ok()?;
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).ok()?;
    let body = child(document.root_element(), "Body")?;
    let first = body.first_element_child()?;
    if first.has_tag_name("Fault") {
        let detail = child(first, "detail").and_then(|detail| detail.first_element_child());
        let message = value(first, "faultstring").unwrap_or_default();
        return Some(Err(said(detail, message)));
    }
    read(first).map(Ok)
}

/// Reads a `LocalizedMethodFault`, as tasks have it.
pub(crate) fn localized(node: Node<'_, '_>) -> Said {
    said(child(node, "fault"), value(node, "localizedMessage").unwrap_or_default())
}

/// Returns code and message of a fault: its type, and the names of its objects.
fn said(fault: Option<Node<'_, '_>>, message: &str) -> Said {
    let Some(fault) = fault else { return Said { code: "Fault".to_owned(), message: message.to_owned() } };
    let code = kind(fault).unwrap_or_else(|| {
        let name = fault.tag_name().name();
        name.strip_suffix("Fault").unwrap_or(name)
    });
    let mut message = message.trim().to_owned();
    for name in ["invalidProperty", "name", "privilegeId", "reason", "key", "existingState", "resourceName"] {
        if let Some(text) = value(fault, name).filter(|text| !message.contains(text)) {
            message = format!("{message} ({name} {text})").trim().to_owned();
        }
    }
    let causes = children(fault, "faultMessage").filter_map(|one| value(one, "message"));
    for cause in causes {
        message = format!("{message} {cause}");
    }
    Said { code: code.to_owned(), message }
}

/// Returns the type of an element, without its prefix.
pub(crate) fn kind<'i>(node: Node<'i, '_>) -> Option<&'i str> {
    node.attribute((XSI, "type")).map(|kind| kind.rsplit(':').next().unwrap_or(kind))
}

/// Returns the first child element with this name.
pub(crate) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Returns the child elements with this name.
pub(crate) fn children<'a, 'i>(node: Node<'a, 'i>, name: &str) -> impl Iterator<Item = Node<'a, 'i>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

/// Returns the text of the first child element with this name; `None`: it is absent or empty.
pub(crate) fn value<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name)?.text().map(str::trim).filter(|text| !text.is_empty())
}

/// Reads the reference that a method returned; the inner `None`: it returned none.
#[expect(clippy::option_option, reason = "an answer of another form is no answer without a reference")]
pub(crate) fn returned(node: Node<'_, '_>) -> Option<Option<Moref>> {
    match child(node, "returnval") {
        None => Some(None),
        Some(found) => Moref::read(found).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> Moref {
        Moref { kind: "VirtualMachine".into(), id: "vm-1".into() }
    }

    fn envelope(inner: &str) -> String {
        format!(
            "<e:Envelope xmlns:e='http://schemas.xmlsoap.org/soap/envelope/' xmlns:xsi='{XSI}'><e:Body>{inner}</e:Body>\
             </e:Envelope>"
        )
    }

    #[test]
    fn a_call_is_well_formed_whatever_its_texts() {
        let arguments = text("name", "a<b>&\"c\u{1}") + &option("guestinfo.x", "<&");
        let method = Method { name: "CloneVM_Task", this: vm(), arguments };
        let body = method.envelope();
        let document = Document::parse(&body).unwrap();
        let call = document.descendants().find(|node| node.has_tag_name("CloneVM_Task")).unwrap();
        assert_eq!(value(call, "name"), Some("a<b>&\"c"));
        assert_eq!(Moref::read(child(call, "_this").unwrap()), Some(vm()));
        let variable = child(call, "extraConfig").unwrap();
        assert_eq!((kind(variable), value(variable, "value")), (Some("OptionValue"), Some("<&")));
    }

    #[test]
    fn a_result_and_a_fault_are_told_apart() {
        let good = envelope("<R xmlns='urn:vim25'><returnval type='Task'>task-1</returnval></R>");
        let task = answer(good.as_bytes(), returned).unwrap().unwrap().unwrap();
        assert_eq!((task.kind.as_str(), task.id.as_str()), ("Task", "task-1"));
        let none = envelope("<R xmlns='urn:vim25'/>");
        assert_eq!(answer(none.as_bytes(), returned).unwrap().unwrap(), None);
        let bad = envelope(
            "<e:Fault><faultcode>ServerFaultCode</faultcode><faultstring>no</faultstring><detail>\
             <NoPermissionFault xmlns='urn:vim25' xsi:type='NoPermission'><privilegeId>VirtualMachine.Inventory.Delete\
             </privilegeId></NoPermissionFault></detail></e:Fault>",
        );
        let fault = answer(bad.as_bytes(), returned).unwrap().unwrap_err();
        assert_eq!(fault.code, "NoPermission");
        assert_eq!(fault.message, "no (privilegeId VirtualMachine.Inventory.Delete)");
        for odd in ["", "<", "<a/>", "{}", &envelope(""), &envelope("<R><returnval type='x'/></R>")] {
            assert!(answer(odd.as_bytes(), returned).is_none(), "{odd}");
        }
        let entities = format!("<!DOCTYPE a [<!ENTITY x 'y'>]>{good}");
        assert!(answer(entities.as_bytes(), returned).is_none(), "entities could grow without bound");
        assert!(answer(b"\xff\xfe", returned).is_none());
    }

    #[test]
    fn the_fault_of_a_task_has_its_type_and_cause() {
        let text = format!(
            "<error xmlns:xsi='{XSI}'><fault xsi:type='vim25:NoDiskSpace'><faultMessage><key>k</key><message>full</message>\
             </faultMessage></fault><localizedMessage>No space.</localizedMessage></error>"
        );
        let text = text.replace("<error", "<error xmlns:vim25='urn:vim25'");
        let document = Document::parse(&text).unwrap();
        let said = localized(document.root_element());
        assert_eq!((said.code.as_str(), said.message.as_str()), ("NoDiskSpace", "No space. full"));
    }
}
