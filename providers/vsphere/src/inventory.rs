//! Reads objects of the vCenter: by path, by name, and their properties. May call `FindByInventoryPath`, `FindChild`,
//! `RetrievePropertiesEx` and `ContinueRetrievePropertiesEx`.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::ApiCall;
use peerpod_provider_rest::Failure;
use roxmltree::Node;

use crate::client::Vcenter;
use crate::soap::{self, Method, Moref, child, children, element, text, value};

/// Most objects of a page.
const PAGE: usize = 100;
/// Most pages of a list.
const MAX_PAGES: usize = 1000;

/// Object of an answer, with the properties that were asked for.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a, 'i>(pub Node<'a, 'i>);

impl<'a, 'i> Object<'a, 'i> {
    /// Returns the reference of the object.
    pub(crate) fn moref(self) -> Option<Moref> {
        child(self.0, "obj").and_then(Moref::read)
    }

    /// Returns the value of a property, as it is in `propSet` or `changeSet`.
    pub(crate) fn property(self, name: &str) -> Option<Node<'a, 'i>> {
        let is_property =
            |node: &Node<'_, '_>| node.has_tag_name("propSet") || node.has_tag_name("changeSet");
        let set = self.0.children().filter(is_property).find(|set| value(*set, "name") == Some(name))?;
        child(set, "val")
    }

    /// Returns the text of a property; `None`: it is absent or empty.
    pub(crate) fn text(self, name: &str) -> Option<&'a str> {
        self.property(name)?.text().map(str::trim).filter(|text| !text.is_empty())
    }

    /// Returns the reference in a property.
    pub(crate) fn reference(self, name: &str) -> Option<Moref> {
        self.property(name).and_then(Moref::read)
    }

    /// Returns the references in a property that is a list.
    pub(crate) fn references(self, name: &str) -> Vec<Moref> {
        let list = self.property(name).into_iter().flat_map(|list| list.children());
        list.filter_map(Moref::read).collect()
    }
}

/// Objects to read.
pub(crate) enum Objects<'o> {
    These(&'o [Moref]),
    /// The children of a folder.
    In(&'o Moref),
}

/// Returns the `PropertyFilterSpec` for these properties of objects of a type.
pub(crate) fn spec(kind: &str, properties: &[&str], objects: &Objects<'_>) -> String {
    let paths: String = properties.iter().map(|path| text("pathSet", path)).collect();
    let properties = element("propSet", &(text("type", kind) + &paths));
    let objects: String = match objects {
        Objects::These(these) => these.iter().map(|one| element("objectSet", &one.xml("obj"))).collect(),
        Objects::In(folder) => {
            let step = text("type", "Folder") + &text("path", "childEntity") + &text("skip", "false");
            let step = soap::typed("selectSet", "TraversalSpec", &step);
            element("objectSet", &(folder.xml("obj") + &text("skip", "true") + &step))
        }
    };
    // Objects that are gone are left out instead of failing the call.
    properties + &objects + &text("reportMissingObjectsInResults", "true")
}

impl Vcenter {
    /// Finds an object by its path, like `DC0/vm/peerpods`. `None`: there is none.
    pub(crate) async fn by_path(&self, what: &str, path: &str) -> Result<Option<Moref>, Failure> {
        let name = "FindByInventoryPath";
        let this = self.services().await.map_err(|error| error.during(what))?.search_index.clone();
        let method = Method { name, this, arguments: text("inventoryPath", path) };
        self.call(ApiCall::new(name, path, what), &method, soap::returned).await
    }

    /// Finds a child of a folder by its name. `None`: there is none.
    pub(crate) async fn child(
        &self,
        call: ApiCall<'_>,
        folder: &Moref,
        name: &str,
    ) -> Result<Option<Moref>, Failure> {
        let this = self.services().await.map_err(|error| error.during(call.what))?.search_index.clone();
        let arguments = folder.xml("entity") + &text("name", name);
        let call = ApiCall { action: "FindChild", ..call };
        self.call(call, &Method { name: "FindChild", this, arguments }, soap::returned).await
    }

    /// Reads properties of objects of a type, from all pages. Objects that are gone, and those that `read` does not know,
    /// are left out.
    pub(crate) async fn retrieve<T>(
        &self,
        call: ApiCall<'_>,
        (kind, properties): (&str, &[&str]),
        objects: Objects<'_>,
        read: impl Fn(Object<'_, '_>) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        if matches!(objects, Objects::These([])) {
            return Ok(Vec::new());
        }
        let this = self.services().await.map_err(|error| error.during(call.what))?.property_collector.clone();
        let page = |node: Node<'_, '_>| {
            // Without any object there is no result.
            let Some(result) = child(node, "returnval") else { return Some((None, Vec::new())) };
            let found = children(result, "objects").filter_map(|object| read(Object(object))).collect();
            Some((value(result, "token").map(str::to_owned), found))
        };
        let options = element("options", &text("maxObjects", &PAGE.to_string()));
        let arguments = element("specSet", &spec(kind, properties, &objects)) + &options;
        let mut method = Method { name: "RetrievePropertiesEx", this, arguments };
        let mut found: Vec<T> = Vec::new();
        for _ in 0..MAX_PAGES {
            let call = ApiCall { action: method.name, ..call };
            let (next, page): (Option<String>, Vec<T>) = self.call(call, &method, page).await?;
            found.extend(page);
            let Some(next) = next else { return Ok(found) };
            method.name = "ContinueRetrievePropertiesEx";
            method.arguments = text("token", &next);
        }
        Err(Error::transient(format!("{}: the list has more than {MAX_PAGES} pages", call.what)).into())
    }

    /// Reads properties of one object. `None`: it is gone.
    pub(crate) async fn retrieve_one<T>(
        &self,
        call: ApiCall<'_>,
        properties: &[&str],
        object: &Moref,
        read: impl Fn(Object<'_, '_>) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let objects = Objects::These(std::slice::from_ref(object));
        Ok(self.retrieve(call, (&object.kind, properties), objects, read).await?.into_iter().next())
    }
}
