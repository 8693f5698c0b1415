"""VMware's models as a witness: sends each SOAP request through them and back, and names what they do not know, also
elements in another order. The models are those of the oldest supported vCenter, 6.5.

Standard input has one {"body": REQUEST} per line; standard output has one list of the differences per line.
"""

import json
import sys
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from pyVmomi import VmomiSupport, vim  # noqa: F401: vim registers the types
from pyVmomi.SoapAdapter import SoapResponseDeserializer, SoapStubAdapterBase

SOAP = "{http://schemas.xmlsoap.org/soap/envelope/}"
TYPE = "{http://www.w3.org/2001/XMLSchema-instance}type"
SPACES = (
    'xmlns="urn:vim25" xmlns:xsd="http://www.w3.org/2001/XMLSchema" '
    'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
)
VERSION = next(name for name in VmomiSupport.nsMap if VmomiSupport.GetVersionNamespace(name) == "vim25/6.5")


class Stub(SoapStubAdapterBase):
    requestContext = None

    def SupportServerGUIDs(self):
        return False


def local(text):
    return text.rsplit("}", 1)[-1].rsplit(":", 1)[-1]


def compare(place, ours, theirs, found):
    for name in ["type", TYPE]:
        # A type that follows from the place may be left out.
        if ours.get(name) and theirs.get(name) and local(ours.get(name)) != local(theirs.get(name)):
            found.append(f"{place}: another type in the model")
    if len(ours) == 0 and len(theirs) == 0 and (ours.text or "").strip() != (theirs.text or "").strip():
        found.append(f"{place}: the model changes it")
    names = [[local(child.tag) for child in element] for element in (ours, theirs)]
    if names[0] != names[1]:
        unknown = [name for name in names[0] if name not in names[1]]
        missing = [name for name in names[1] if name not in names[0]]
        found.append(f"{place}: {', '.join(unknown + missing) or 'the order'} differs in the model")
        return
    for one, other in zip(ours, theirs):
        compare(f"{place}/{local(one.tag)}", one, other, found)


def text(element):
    """Returns the element with prefixes that the models know."""
    types = [(name, element.get(key)) for name, key in (("type", "type"), ("xsi:type", TYPE)) if element.get(key)]
    attributes = "".join(f" {name}={quoteattr(value)}" for name, value in types)
    inner = "".join(map(text, element)) or escape(element.text or "")
    return f"<{local(element.tag)}{attributes}>{inner}</{local(element.tag)}>"


def argument(stub, parameter, elements):
    """Reads an argument as the result of a method."""
    if not elements:
        return None
    answer = f"<XResponse {SPACES}>{''.join(map(text, elements))}</XResponse>"
    return SoapResponseDeserializer(stub).Deserialize(answer, parameter.type)


def differences(body):
    stub = Stub(VERSION)
    call = ElementTree.fromstring(body).find(f"{SOAP}Body")[0]
    method = VmomiSupport.GetWsdlMethod("urn:vim25", local(call.tag))
    this, found = call[0], []
    known = {"_this", *(parameter.name for parameter in method.info.params)}
    found += [f"{local(child.tag)}: no such argument" for child in call if local(child.tag) not in known]
    values = []
    for parameter in method.info.params:
        elements = [child for child in call if local(child.tag) == parameter.name]
        if not elements and not parameter.flags & VmomiSupport.F_OPTIONAL:
            found.append(f"{parameter.name}: is required")
        values.append(argument(stub, parameter, elements))
    receiver = VmomiSupport.GetWsdlType("urn:vim25", this.get("type"))(this.text, stub)
    if not issubclass(type(receiver), method.info.type):
        found.append(f"_this: {this.get('type')} has no such method")
    written = ElementTree.fromstring(stub.SerializeRequest(receiver, method.info, values))
    compare(local(call.tag), call, written.find(f"{SOAP}Body")[0], found)
    return found


for line in sys.stdin:
    try:
        print(json.dumps(differences(json.loads(line)["body"])), flush=True)
    except Exception as error:
        print(json.dumps([f"{type(error).__name__}: {error}"]), flush=True)
