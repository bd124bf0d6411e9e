"""Pages: what is escaped, and what stands out."""

from kvrecall_server.reporting.html import Page, joined, marked


def parts(page: Page) -> str:
    return "".join(page.parts)


def test_text_is_escaped_wherever_it_stands() -> None:
    page = Page("t")
    page.heading("<1>")
    page.subheading("<2>")
    page.paragraph("<3>")
    page.code("<4>")
    page.table(["<5>"], [["<6>"]])
    for number in range(1, 7):
        assert f"&lt;{number}&gt;" in parts(page)


def test_marked_text_is_escaped_once_and_stays_marked_in_a_table() -> None:
    page = Page("t")
    page.table(["reply"], [[joined("a < ", marked("b & c", "right"))]])
    assert '<td>a &lt; <mark class="right">b &amp; c</mark></td>' in parts(page)
